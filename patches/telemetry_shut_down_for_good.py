"""A second `pretrain()` in one process never ends its telemetry, and loses data not sent yet.

Symptom:
    Spans and metrics of the second run's last seconds, which are still in the exporter's queue, are
    lost. No error.

Cause:
    `_end_otel_job_spans()` shuts telemetry down once per process, and remembers that in a global of
    the module. A second run, after `destroy_global_state()`, sets up a new handle, which is never
    shut down; and only a shutdown flushes the queue.

Affects:
    Main after July 2026 (#6438, #6415), if telemetry is on. What the patch does: each handle is
    shut down at the end of its own run. If `train()` raises, it leaves an interval's span open,
    which needs no repair: the next `train()` closes it, if intervals are on.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/6438, `_end_otel_job_spans`.

Remove when:
    upstream remembers which handle was shut down. `upstream/telemetry-shut-down-for-good` has the
    repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patching.base import PerProcessDict

from ._case import OPEN, Fault, Original, Patch, address, target

#: "handle" → the handle that was shut down last.
_ended: dict[str, Any] = PerProcessDict(__name__, "_ended")


def end_job_spans(original: Original) -> None:
    """Wrap `_end_otel_job_spans`: shut down every telemetry handle, not only the first."""
    from megatron.training import training

    handle = training.get_telemetry()
    if handle is not None and training._otel_shutdown_done:
        training._otel_shutdown_done = _ended.get("handle") is handle
    original()
    _ended["handle"] = handle


class _Handle:
    """Stands in for a telemetry handle, and counts its shutdowns."""

    is_exporting = True
    shutdowns = 0

    def shutdown(self) -> None:
        self.shutdowns += 1


def reproduce() -> None:
    """End two runs in one process, each with a telemetry handle of its own.
    On stock Megatron the second handle is never shut down.
    """
    from megatron.training import global_vars, training

    handles = [_Handle(), _Handle()]
    for handle in handles:
        global_vars._GLOBAL_TELEMETRY_HANDLE = handle
        training._end_otel_job_spans()
    training._end_otel_job_spans()
    counts = [handle.shutdowns for handle in handles]
    if counts != [1, 1]:
        raise Fault(f"telemetry of two runs was shut down {counts} times")


PATCH = Patch(
    "a second pretrain() in one process never ends its telemetry, and loses the last of it",
    target("training._end_otel_job_spans", end_job_spans),
    since="0.20",
    before=OPEN,
    groups=("train-again",),
    fixed_by=((address("training._end_otel_job_spans"), "_otel_shutdown_done = _otel_handle"),),
    ranks=1,
)
