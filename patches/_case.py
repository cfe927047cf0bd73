"""Collects the imports of case files: records and targets, a bench, and helpers for reproductions.

A reproduction raises a `Fault` if it finds the hazard. If upstream itself raises, the case file
names that error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_idempotent.megatron.targets import PIPELINED as PIPELINED
from megatron_idempotent.megatron.targets import TRAINING as TRAINING
from megatron_idempotent.megatron.targets import address as address
from megatron_idempotent.megatron.targets import schedule_targets as schedule_targets
from megatron_idempotent.megatron.targets import step_targets as step_targets
from megatron_idempotent.megatron.targets import target as target
from megatron_idempotent.patching import OPEN as OPEN
from megatron_idempotent.patching import Helper as Helper
from megatron_idempotent.patching import Limit as Limit
from megatron_idempotent.patching import Original as Original
from megatron_idempotent.patching import Patch as Patch
from megatron_idempotent.patching import a_body_has as a_body_has
from megatron_idempotent.patching import arguments as arguments
from megatron_idempotent.patching import no_body_has as no_body_has

if TYPE_CHECKING:
    from megatron_idempotent.proof.cpu.program import Program
    from megatron_idempotent.proof.cpu.tiny import Tiny


class Fault(Exception):
    """Is raised by a reproduction that observes the wrong behaviour of its hazard."""


def bench(**options: Any) -> Tiny:
    """Build a tiny model with its optimizer on this rank; `options` are as in `cpu.tiny.build`."""
    from megatron_idempotent.proof.cpu import tiny

    return tiny.build(**options)


def program(*args: Any, **options: Any) -> Program:
    """Start a small program on stock `megatron.training` on this rank, like `cpu.program.start`."""
    from megatron_idempotent.proof.cpu import program

    return program.start(*args, **options)


def abort_in_backward(model: Any, register: Callable[[Any, Callable[..., None]], Any]) -> None:
    """Run one microbatch of a tiny model, and interrupt its backward by an exception.
    The exception is caught here.

    Args:
        register: `register(param, fail)` hooks `fail` to the parameter whose gradient is computed
        last, and returns the handle.
    """

    def fail(*_: Any) -> None:
        raise ValueError("interrupted")

    hook = register(next(model.chunks[0].module.parameters()), fail)
    try:
        model.forward_backward(1, data_seed=1)
    except ValueError:
        hook.remove()


def interrupt_window(model: Any, *, at: int, forward_only: bool = False) -> None:
    """Run two microbatches, and raise before the forward of microbatch `at` (0 or 1).
    The exception is caught here.
    """

    def fail(index: int, loss: Any) -> None:
        if index == at:
            raise Broken("a microbatch that cannot be read")

    model.on_microbatch = fail
    try:
        model.forward_backward(2, data_seed=0, forward_only=forward_only)
    except Broken:
        model.on_microbatch = None


def expect_gradients(model: Any, expected: Any) -> None:
    """Run one more window of one microbatch; raise a `Fault` unless its gradients are `expected`.
    The comparison is bit for bit.
    """
    model.forward_backward(1, data_seed=0)
    if not model.gradients().equal(expected):
        raise Fault("the gradients of a window depend on the aborted one before it")


#: Fields of the config for routers that learn a bias from the tokens that they count.
EXPERT_BIAS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}


def gathered(tensor: Any, group: Any = None) -> list[Any]:
    """Gather a tensor from all ranks of a group, by default WORLD; return them in rank order.
    A collective.
    """
    import torch

    tensors = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(tensors, tensor.detach().contiguous(), group=group)
    return tensors


def backward(model: Any, *, data_seed: int, summed: bool = False) -> int:
    """Run forward and backward of one microbatch of a tiny model, without a pipeline schedule.

    The loss is the mean over all tokens or, if `summed`, their sum. Returns the number of tokens.
    """
    from megatron_idempotent.proof.cpu import tiny

    tokens_BT, *positions_and_mask = tiny.inputs(data_seed)
    loss_BT = model.chunks[0](tokens_BT, *positions_and_mask, labels=tokens_BT).float()
    (loss_BT.sum() if summed else loss_BT.mean()).backward()
    return int(loss_BT.numel())


def of_context_rank(chunk: Any, tokens_BT: Any, mask_BT: Any) -> Any:
    """Run the chunk, which may have MTP layers, on the positions of rows `tokens_BT` that this
    context-parallel rank computes, and return the tokens' losses. `mask_BT` is the loss mask at
    these positions.
    """
    import torch

    from megatron_idempotent.proof.cpu import tiny
    from megatron_idempotent.step import own_positions

    return chunk(
        own_positions(tokens_BT),
        own_positions(torch.arange(tokens_BT.shape[1], device="cuda").expand_as(tokens_BT)),
        None,
        labels=own_positions(tokens_BT.roll(-1, 1)),
        loss_mask=mask_BT,
        **tiny.mtp_labels(chunk, own_positions(tokens_BT)),
    )


def expect_weight_per_token(*, tp: int = 1, **config: Any) -> None:
    """Raise a `Fault` if `calculate_per_token_loss` changes the weight of MoE auxiliary losses.
    It compares a router's gradient with and without that option.
    """
    gradients = []
    for per_token in (False, True):
        model = bench(
            tp=tp,
            sequence_parallel=tp > 1,
            experts=4,
            overlap_grad_reduce=False,
            config_overrides={
                "moe_aux_loss_coeff": 1.0,
                "calculate_per_token_loss": per_token,
                **config,
            },
        )
        (chunk,) = model.chunks
        chunk.zero_grad_buffer()
        tokens = backward(model, data_seed=0, summed=per_token)
        gradient = chunk.module.decoder.layers[0].mlp.router.weight.main_grad.clone()
        gradients.append(gradient / (tokens if per_token else 1))
    mean, per_token_mean = gradients
    if not mean.equal(per_token_mean):
        raise Fault(
            f"router gradient norm {per_token_mean.norm():.4g} per token, "
            f"{mean.norm():.4g} of means"
        )


def counted(model: Any, pattern: str = "", *, zeros: bool = False) -> int:
    """Return how many parameter elements a tiny model's gradient norm counts.
    The parameters whose names match the regular expression `pattern` get gradients of ones, all
    others zeros. The result is the squared norm.

    With `zeros` these get zeros, all others ones, and the optimizer's number of zeros is returned.
    All ranks take part.
    """
    import re

    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            parameter.main_grad.fill_(float(bool(re.search(pattern, name)) is not zeros))
    model.optimizer.prepare_grads()
    if zeros:
        return int(model.optimizer.count_zeros())
    return round(float(model.optimizer.get_grad_norm()) ** 2)


def expect_agreement(model: Any, when: str) -> None:
    """Raise a `Fault` if the data-parallel ranks hold different parameters.
    A collective. `when` is the end of the error's message.
    """
    import torch

    local = model.parameters().cuda()  # NCCL takes nothing from the host
    most, least = local.clone(), local.clone()
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    differing = float((most != least).float().mean())
    if differing:
        raise Fault(
            f"parameters differ between data-parallel ranks on {differing:.0%} of the elements "
            f"{when}"
        )


class Broken(Exception):
    """Is raised by reproductions on purpose, for example in a forward step, and caught there."""


def interrupt(running: Any) -> None:
    """Call `train(1)` of a `cpu.program` with a forward step that raises.
    The exception is caught, and the old forward step is restored.

    All ranks call it at once: a rank that fails alone leaves the others waiting for it.
    """
    step = running._forward_step

    def broken(*_: Any) -> None:
        raise Broken("a microbatch that cannot be read")

    running._forward_step = broken
    try:
        running.train(1)
    except Broken:
        return
    finally:
        running._forward_step = step
    raise AssertionError("train() swallowed the exception")


def shared_folder() -> str:
    """Create a temporary folder on rank 0, and return its path on all ranks. A collective."""
    import tempfile

    import torch

    paths = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(paths)
    return paths[0]


def once_there(path: Any, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Wait until the file `path` exists, then call `function` with the other arguments.
    `once_there` is a module-level function, so that a partial of it can be pickled.
    """
    import time

    while not path.exists():
        time.sleep(0.01)
    function(*args, **kwargs)


def begin_save(state: Any) -> None:
    """Run `dist_checkpointing.save` of a state, but stop it before it starts to write.

    Not every release's writer runs on every torch.
    """
    import tempfile

    from megatron.core import dist_checkpointing

    def stop(_: Any) -> None:
        raise Broken("before the writer")

    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Broken):
        dist_checkpointing.save(state, folder, preprocess_common_before_consistancy_check=stop)
        raise AssertionError("save() did not validate its arguments")
