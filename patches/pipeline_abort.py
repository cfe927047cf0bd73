"""A window that one rank leaves half-way hangs the others or sends them tensors of that window.

Symptom:
    One rank raises inside of a window: a bad sample, out of memory, a NaN that a check finds. Its
    adjacent pipeline stages and its data-parallel peers wait for ever. If all ranks raise, but at
    different points, messages are left over: the next window receives them as its own, its
    gradients are silently those of the aborted window, and the other stage hangs.

Cause:
    A rank that leaves a schedule has sent messages that the adjacent stages will receive in the
    next window, and does not send messages or start collectives that other ranks wait for. Both
    pair up by order alone; they do not carry the window to which they belong.

Affects:
    Every release, with pipeline or data parallelism. No wrapper can recall sent messages. Run the
    window with `guarded_window`: the failing rank stays in the schedule with zeros, starts the
    reductions and gathers that its peers expect, and all ranks raise `WindowAborted` before
    gradients are finalized. For failures before the window, such as a bad batch, call `agree`. A
    failure inside of a layer under tensor, context or expert parallelism cannot be delayed: it
    poisons the session until `rebuild_process_groups`. See docs/aborting.md.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/pipeline_parallel/schedules.py,
    `forward_backward_pipelining_without_interleaving`: nothing is cancelled when a step raises.

Remove when:
    the schedules end a window on all ranks when one of them raises.
"""

from __future__ import annotations

import functools
from typing import Any

from ._case import Fault, Helper, bench


def reproduce(*, helped: bool) -> None:
    """Raise in microbatch 1 on both of two pipeline stages, then run another window.
    That window receives gradients of the aborted one; with `helped`, `guarded_window` prevents
    this.
    """
    model = bench(pp=2, overlap_grad_reduce=False, distributed_optimizer=False)
    model.config.finalize_model_grads_func = None  # the sum over stages is not compared
    model.forward_backward(4, data_seed=1)
    expected = model.gradients()
    if helped:
        _guard()

    def fail(index: int, loss: Any) -> None:
        if index == 1:
            raise ValueError("bad sample")

    model.on_microbatch = fail
    try:
        model.forward_backward(4, data_seed=2)
    except (ValueError, RuntimeError) as error:
        if "bad sample" not in str(error):
            raise
    model.on_microbatch = None
    # Without the guard the first stage receives a gradient of the aborted window, and ends early.
    model.forward_backward(4, data_seed=1)
    if not model.gradients().equal(expected):
        raise Fault("the gradients of a window are those of the aborted one before it")


def control(*, helped: bool) -> list[bytes]:
    """Run training windows and forward-only windows without failures, as a control.
    With `helped` the guard is on, and every recovery function is called between windows. Return the
    parameters' bytes.
    """
    from megatron_idempotent import abort_window, verify
    from megatron_idempotent.window import agree, rebuild_process_groups

    if helped:
        _guard()
    model = bench(pp=2)
    bits = []
    for window, microbatches in enumerate((4, 2, 3)):
        if helped:
            verify()
            agree()
            abort_window(model.chunks, model.optimizer)
        if helped and window == 2:  # it is slow, so once
            rebuild_process_groups(model.chunks, model.optimizer)
        model.train_step(microbatches, data_seed=window)
        bits.append(model.bits())
        model.forward_backward(1, data_seed=window, forward_only=True)
    return bits


def _guard() -> None:
    from megatron.core import pipeline_parallel

    from megatron_idempotent.window.guard import guarded_window

    schedule = pipeline_parallel.get_forward_backward_func
    pipeline_parallel.get_forward_backward_func = lambda: functools.partial(
        guarded_window, schedule()
    )


HELPER = Helper(
    summary="a window that a rank leaves half-way hangs the others, or corrupts the next window",
    call="guarded_window",
    loudness="both",
)
