"""A linear layer with a frozen weight returns the gradient of its bias."""

from upstream.edits import Repair, replace

REPAIR = Repair(
    edits=(
        replace(
            "megatron.core.tensor_parallel.layers:LinearWithFrozenWeight.backward",
            "return (grad_input",
            """
            grad_bias = None
            if ctx.needs_input_grad[2]:
                grad_bias = grad_output.reshape(-1, grad_output.size(-1)).sum(dim=0)

            return grad_input, None, grad_bias, None, None, None
            """,
        ),
    ),
    unit_tests=("tensor_parallel/test_layers.py",),
    ranks=2,
)
