"""A piece that autograd would not record, as no input requires a gradient, runs directly."""

from upstream.edits import Repair, before

REPAIR = Repair(
    edits=(
        before(
            "megatron.core.tensor_parallel.random:checkpoint",
            "return CheckpointFunction.apply",
            """
            # Autograd drops the function if none of its inputs requires a gradient, although its
            # parameters may require one: adapters behind a frozen embedding, for example.
            if torch.is_grad_enabled() and not any(
                isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args
            ):
                return function(*args)
            """,
        ),
    ),
    unit_tests=("tensor_parallel/test_random.py", "transformer/test_transformer_block.py"),
)
