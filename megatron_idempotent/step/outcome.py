"""What is told of a step that has ended."""

from __future__ import annotations

from .backend import Update
from .records import Kind, StepResult
from .totals import Totals


def result_of(
    step_id: str,
    kind: Kind,
    totals: Totals,
    update: Update | None,
    rates: tuple[float, float],
    *,
    microbatches: int,
    own_microbatches: int,
) -> StepResult:
    """The result of a step with this update, or of one in which nothing was valid.

    `rates` are learning rate and weight decay as they are now, for a step that has used none.
    """
    skipped = None
    lr, weight_decay = rates
    if update is None:
        skipped = f"no valid {kind} on any rank"
    else:
        lr, weight_decay = update.lr, update.weight_decay
        if not update.updated:
            skipped = "gradients overflowed; a dynamic loss scale is lower now"
    return StepResult(
        step_id=step_id,
        updated=skipped is None,
        skipped=skipped,
        grad_norm=None if update is None else update.grad_norm,
        global_valid_sequences=totals.sequences,
        global_valid_tokens=totals.tokens,
        microbatches=microbatches,
        auxiliary_loss_scale=1.0 / max(own_microbatches, 1),
        lr=lr,
        weight_decay=weight_decay,
        metrics=totals.metrics(),
        rows=totals.rows(lr=lr, wd=weight_decay),
    )


def no_way_back(step_id: str, what: str) -> RuntimeError:
    """For what was asked of a step in which all ranks have updated, besides its result."""
    return RuntimeError(
        f"{what}(): all ranks have updated in step {step_id!r}; finish() it again for its result"
    )
