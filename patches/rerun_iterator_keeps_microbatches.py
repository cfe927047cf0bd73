"""A data iterator of the rerun state machine keeps every microbatch of the run.

Symptom:
    Host memory grows with each schedule call, if a caller with its own loop reads through
    `RerunDataIterator` and the rerun mode is not `DISABLED`, as with Megatron's default since 0.14
    (`--rerun-mode validate_results`). The microbatches are also saved in checkpoints.

Cause:
    The iterator keeps the microbatches that a rerun would replay; only
    `should_run_forward_backward`, which such a loop does not call, drops them.

Affects:
    Every release. There is no patch, because only the loop knows whether an iteration will be
    rerun. Call `data_iterator.advance()` after each step, or set the mode to `DISABLED`.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/rerun_state_machine.py,
    `RerunDataIterator`.

Remove when:
    the iterator keeps microbatches only inside of an iteration of the state machine.
"""

from __future__ import annotations

from ._case import Fault, Limit


def reproduce() -> None:
    """Read five windows of two microbatches through `RerunDataIterator` without Megatron's loop.
    The iterator still holds all ten microbatches afterwards.
    """
    from megatron.core.rerun_state_machine import (
        RerunDataIterator,
        RerunMode,
        get_rerun_state_machine,
    )

    from megatron_idempotent.proof.cpu import tiny

    get_rerun_state_machine().set_mode(RerunMode.VALIDATE_RESULTS)
    model = tiny.build(overlap_grad_reduce=False)
    data = RerunDataIterator(tiny.microbatches(0))
    for _ in range(5):
        model.chunks[0].zero_grad_buffer()
        model.schedule(data, 2)
    if len(data.saved_microbatches) > 2:
        raise Fault(f"{len(data.saved_microbatches)} microbatches kept after five windows")


LIMIT = Limit(
    summary="a RerunDataIterator outside of Megatron's own loop keeps every microbatch", ranks=1
)
