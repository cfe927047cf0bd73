"""Runs correct programs close to hazards of a chunk's reductions, as controls for patches.

They take steps like frameworks that defer `finalize_model_grads`: each step is one or several
schedule calls without a reduction, and one reduction after them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

from megatron_idempotent.megatron.ddp import bucket_groups

from ._case import Fault, bench


class Steps(NamedTuple):
    """Describes consecutive optimizer steps: microbatches of each schedule call, DDP settings."""

    calls: tuple[tuple[int, ...], ...]
    """Microbatches of each schedule call, by step."""
    overlap: bool = True
    distributed: bool = True
    wired: bool = True
    """True if `config.no_sync_func` is set when reductions overlap."""
    held: bool = False
    """True if all calls of a step but the last are made inside of `no_sync()`."""
    learns: bool = False
    """True if bucket groups have to learn how many gradients a step registers, as from 0.16."""


#: Stock Megatron takes all of these steps correctly; together they cover both values of every
#: switch.
ALL = (
    Steps(calls=((2,), (3,), (1,))),
    Steps(calls=((2, 1), (1,), (1, 2, 1)), wired=False, held=True),
    Steps(calls=((2, 2),) * 3, distributed=False, learns=True),
    Steps(calls=((2,),) * 3, wired=False, learns=True),
    Steps(calls=((2, 2), (3,), (1, 2, 1)), overlap=False),
)


def run_all() -> list[bytes]:
    """Run the step sequences in `ALL`, which stock Megatron runs correctly; return this rank's
    parameters after each step, as bytes.

    Raises:
        Fault: a step differs from the same step without overlap.
    """
    parameters = []
    for steps in ALL:
        bits = _run(steps)
        if bits and steps.overlap and bits != _run(steps._replace(overlap=False)):
            raise Fault(f"parameters differ from those without overlap after {steps}")
        parameters += bits
    return parameters


def _run(steps: Steps) -> list[bytes]:
    model = build(overlap=steps.overlap, distributed=steps.distributed, wired=steps.wired)
    if steps.learns and steps.overlap and not learns(model):
        return []
    parameters = []
    for number, calls in enumerate(steps.calls):
        step(model, calls, held=steps.held, data_seed=10 * number)
        model.step()
        parameters.append(model.bits())
    return parameters


def build(*, overlap: bool, distributed: bool, wired: bool = True) -> Any:
    """Build a one-layer model without a finalize function in its config, so that schedule calls do
    not reduce gradients. `step` reduces them.

    Its optimizer does not clip, because other buckets would sum the norm in another order.
    """
    model = bench(
        overlap_grad_reduce=overlap,
        distributed_optimizer=distributed,
        layers_per_stage=1,
        optimizer_overrides={"clip_grad": 0.0},
    )
    model.config.finalize_model_grads_func = None
    if not wired:
        model.config.no_sync_func = None
    return model


def step(model: Any, calls: tuple[int, ...], *, held: bool = False, data_seed: int) -> None:
    """Run one step's schedule calls, then reduce the gradients with `finalize_model_grads`.
    `calls` has the number of microbatches of each call. With `held` all calls but the last run
    inside of `no_sync()`. The optimizer does not step.
    """
    from megatron.core.distributed import finalize_model_grads

    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    model.optimizer.zero_grad()
    for index, microbatches in enumerate(calls):
        with ExitStack() as stack:
            if held and index < len(calls) - 1:
                for chunk in model.chunks:
                    stack.enter_context(chunk.no_sync())
            model.forward_backward(microbatches, data_seed=data_seed + index, zero_first=False)
    finalize_model_grads(model.chunks)


def learns(model: Any) -> bool:
    """Return whether bucket groups of this Megatron learn from a first batch how many gradients
    each parameter gets in a step.
    """
    return hasattr(bucket_groups(model.chunks[0])[0], "is_first_batch")
