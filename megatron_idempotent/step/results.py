"""Holds the results that a step and its calls return to the caller."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from .loss import Metrics, as_numbers, merge


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchResult:
    """Holds what one call of `microbatch()` ran on this rank, and what the loss returned.

    Example: `step.microbatch(step_id, batch).rows`.
    """

    microbatch_id: str
    rows: int
    """The number of the batch's sequences, masked ones included."""
    microbatches: int
    """The number of microbatches that this rank ran for the batch."""
    outputs: Mapping[str, tuple[Tensor, ...]] = dataclasses.field(default_factory=dict, repr=False)
    """A tensor for each sequence, in the order given, by the names in the loss's `outputs`. Only
    ranks that have the loss (those of the last pipeline stage) have any."""
    reported: tuple[Metrics, ...] = dataclasses.field(default=(), repr=False)
    """The sum and the metrics that the loss returned for each microbatch, on ranks that have it."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this rank's microbatches, not divided by anything: the minimum or
        maximum of those with `_min` or `_max` in their name, sums of all others.

        It waits for the device, as `finish()` does once for the whole step. Empty on ranks that do
        not have the loss.
        """
        return merge(as_numbers(self.reported))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Reports a step's outcome, the same on all ranks. Example: `step.finish(step_id).metrics`."""

    step_id: str
    updated: bool
    """True if the optimizer changed parameters."""
    skipped: str | None
    """The reason for which no update was made: nothing was valid in the step, gradients overflowed
    under a loss scale (and what became of the scale), or `non_finite="skip"`; else None."""
    grad_norm: float | None
    """Norm before clipping, of gradients divided by the normalizer; None if not computed."""
    global_valid_sequences: float
    global_valid_tokens: float
    microbatches: int
    """Microbatches of all data-parallel ranks together."""
    auxiliary_loss_scale: float
    """1 / microbatches of this rank, for Megatron's logging of MoE and MTP losses:
    `track_moe_metrics(loss_scale=…)`. This and `reported_by` may differ between ranks."""
    lr: float
    """The learning rate of this step, before the scheduler moved on."""
    weight_decay: float
    metrics: Mapping[str, float]
    """Metrics over all microbatches of all ranks: sums ÷ their normalizer, minima, maxima."""
    rows: tuple[Mapping[str, float], ...]
    """A row per microbatch of all replicas, by the rank that reports it and then in order; each is
    normalised as `metrics` is, and has `lr`, `wd`, `global_valid_seqs`, `global_valid_toks`,
    `rank` (the global rank that reports for its replica) and `replica` (its data-parallel rank)."""
    reported_by: int = dataclasses.field(default=0, compare=False)
    """Global rank of this process."""
    replica: int = dataclasses.field(default=0, compare=False)
    """Data-parallel rank of this process."""

    @property
    def own_rows(self) -> tuple[Mapping[str, float], ...]:
        """The rows of metrics, one per microbatch, that this rank reports.
        Over all ranks together each row of the step comes once.

        One rank of each replica reports; the others have no rows.
        """
        return tuple(row for row in self.rows if row["rank"] == self.reported_by)

    @property
    def replica_rows(self) -> tuple[Mapping[str, float], ...]:
        """The rows of metrics of this rank's replica, in the order of its microbatches; the same on
        all ranks of the replica.
        """
        return tuple(row for row in self.rows if row["replica"] == self.replica)
