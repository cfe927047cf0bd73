"""Errors and results of a step that has ended."""

from __future__ import annotations

import torch.distributed as dist

from .backend import Update
from .records import StepResult
from .totals import Totals


def result_of(
    step_id: str,
    totals: Totals,
    update: Update | str,
    rates: tuple[float, float],
    *,
    own_microbatches: int,
) -> StepResult:
    """The result of a step with this update, or of one without, for the reason that is given.

    `rates` are the learning rate and weight decay that it has used, or would have.
    """
    lr, weight_decay = rates
    skipped = update if isinstance(update, str) else update.skipped
    return StepResult(
        step_id=step_id,
        updated=skipped is None,
        skipped=skipped,
        grad_norm=None if isinstance(update, str) else update.grad_norm,
        global_valid_sequences=totals.sequences,
        global_valid_tokens=totals.tokens,
        microbatches=totals.microbatches,
        auxiliary_loss_scale=1.0 / max(own_microbatches, 1),
        lr=lr,
        weight_decay=weight_decay,
        metrics=totals.metrics(),
        rows=totals.rows(lr=lr, wd=weight_decay),
        reported_by=dist.get_rank() if dist.is_initialized() else 0,
    )


def no_way_back(step_id: str, what: str) -> RuntimeError:
    """Makes the error of a call that comes after all ranks have updated; `finish` alone may."""
    return RuntimeError(
        f"{what}(): all ranks have updated in step {step_id!r}; finish() it again for its result"
    )
