"""A loss function that reports `loss.detach()` reports the loss divided by the microbatches.

Symptom:
    The reported loss is too small by the number of microbatches (and off by the context-parallel
    size, or divided by the tokens). The gradients are right. No error.

Cause:
    The schedules scale the loss in place, and `loss.detach()` shares its memory.

Affects:
    Every release. What the patch does: reported tensors that share memory with the loss are copied
    before the schedule scales it; other tensors are left alone. Not covered: the combined 1F1B
    schedule (`overlap_moe_expert_parallel_comm`), which calls the loss function elsewhere. If a
    loss function multiplies its report by the number of microbatches to make up for this, exclude
    the patch.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/pipeline_parallel/schedules.py,
    `forward_step_calc_loss`.

Remove when:
    the schedules scale the loss out of place. `upstream/reported-loss-divided` has the repair.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ._case import Fault, Original, Patch, address, target


def forward(
    original: Original, forward_step_func: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Wrap `forward_step`: clone reported values that share the loss tensor's memory.
    Upstream divides the loss in place.
    """
    return original(partial(_forward, forward_step_func), *args, **kwargs)


def _forward(forward_step_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output, loss_func = forward_step_func(*args, **kwargs)
    # None on ranks of a multi-module pipeline without a loss.
    return output, None if loss_func is None else partial(_loss, loss_func)


def _loss(loss_func: Callable[..., Any], output: Any, **kwargs: Any) -> Any:
    outputs = loss_func(output, **kwargs)
    # The result with non_loss_data=True may have any form and is not scaled.
    if kwargs or not isinstance(outputs, tuple) or not isinstance(outputs[-1], dict):
        return outputs
    *scaled, report = outputs
    memory = _memory(scaled[0])
    shared = {} if memory is None else {k: v for k, v in report.items() if _memory(v) == memory}
    if shared:
        report = {**report, **{name: value.clone() for name, value in shared.items()}}
    return *scaled, report


def _memory(value: Any) -> int | None:
    storage = getattr(value, "untyped_storage", None)
    return None if storage is None else storage().data_ptr() or None


def reproduce() -> None:
    """Run four microbatches whose loss function reports `loss.detach()`.
    On stock Megatron each reported loss is a quarter of the true one.
    """
    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(overlap_grad_reduce=False, with_optimizer=False)
    tokens_BT, *positions_and_mask = tiny.inputs(0)
    losses = []

    def loss_func(loss_BT: Any) -> tuple[Any, dict[str, Any]]:
        loss = loss_BT.float().mean()
        losses.append(loss.item())
        return loss, {"loss": loss.detach()}

    def forward_step(data_iterator: Any, chunk: Any) -> tuple[Any, Any]:
        return chunk(tokens_BT, *positions_and_mask, labels=tokens_BT), loss_func

    reported = [report["loss"].item() for report in model.schedule(None, 4, forward_step)]
    if reported != losses:
        raise Fault(f"the losses are {losses}, reported were {reported}")


PATCH = Patch(
    "a loss function that reports loss.detach() reports the loss ÷ microbatches",
    target("schedules.forward_step", forward),
    fixed_by=(
        (
            address("schedules.forward_step_calc_loss"),
            "output_tensor = output_tensor * cp_group_size",
        ),
    ),
    ranks=1,
)
