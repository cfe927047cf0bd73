"""`SplitStep` with one bug each in a loss that is a mean over sequences."""

from __future__ import annotations

from typing import Any

from megatron_idempotent.proof.certify import Finished
from megatron_idempotent.proof.certify.adapters import SplitStep, _Loss
from megatron_idempotent.proof.certify.losses import of_positions


class _OfPositions(_Loss):
    kind = "token"

    def __call__(self, output: Any, microbatch: Any) -> Any:
        total, _ = of_positions(output, microbatch)
        return total, {"nll": total}


class MeanOverPositions(SplitStep):
    """Divides what it has added up over positions by their number."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.loss = _OfPositions(subject)


class CountsMaskedSequences(SplitStep):
    """Divides by all rows of a step, those among them that do not count."""

    def begin(self) -> None:
        super().begin()
        self.rows = 0

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        self.rows += len(rows["input_ids"])
        super().microbatch(rows, fail=fail)

    def finish(self) -> Finished:
        rows = self.rows
        found = self.step.finish(
            self.open, global_batch_size=1, divisor=lambda counts: float(max(rows, 1) * 2)
        )
        return Finished(updated=found.updated, grad_norm=found.grad_norm)


class _WeighsByPositions(_Loss):
    def auxiliary_weight(self, microbatch: Any) -> float:
        return float(microbatch["input_ids"].numel())


class WeighsExpertsByPositions(SplitStep):
    """Multiplies MoE's loss by positions, and divides it by sequences (NeMo-RL #3888)."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.loss = _WeighsByPositions(subject)


class NoSequences(SplitStep):
    """Takes a mean over positions alone."""

    sequences = False
