"""One rank of the policy, in a process of its own: what the controller calls on it."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_idempotent.controller import LogprobsOf, StepOutcome
from megatron_idempotent.trainer.job import Job
from megatron_idempotent.trainer.policy.batch import Batch
from megatron_idempotent.trainer.policy.checkpoint import (
    load_weights,
    save_weights,
    weights_digest,
)
from megatron_idempotent.trainer.policy.start import start_policy
from megatron_idempotent.workers import Exports


def make_worker(job: Job) -> PolicyWorker:
    """A factory for `WorkerSpec`."""
    return PolicyWorker(job)


class PolicyWorker(Exports):
    """Every method is called on all ranks of the default group, in the same order.

    Example: `WorkerSpec(factory="megatron_idempotent.trainer.stream.worker:make_worker",
    argument=job)`.
    """

    def __init__(self, job: Job) -> None:
        """Model and optimizer of the run that the job describes. Collective."""
        self._policy = start_policy(job).policy
        super().__init__(self._policy.source(shared=True))

    def begin(self, step_id: str) -> None:
        """Open an optimizer step."""
        self._policy.begin(step_id)

    def logprobs(self, which: LogprobsOf, batch: Batch) -> torch.Tensor:
        """Log-probs [B, T] of this rank's rows."""
        return self._policy.logprobs(batch, which)

    def microbatch(self, step_id: str, microbatch_id: str, last: bool, batch: Batch) -> None:
        """Forward and backward of this rank's rows."""
        self._policy.microbatch(step_id, batch, microbatch_id=microbatch_id, last=last)

    def finish(self, step_id: str) -> StepOutcome:
        """One reduction, one update."""
        result = self._policy.finish(step_id)
        metrics: dict[str, float] = dict(result.metrics)
        metrics["learning_rate"] = result.lr
        if result.grad_norm is not None:
            metrics["grad_norm"] = result.grad_norm
        return StepOutcome(
            updated=result.updated, tokens=int(result.global_valid_tokens), metrics=metrics
        )

    def abort(self, step_id: str | None) -> None:
        """Undo the open step, whichever it is: the controller has one at a time."""
        self._policy.abort()

    def save(self, directory: str, iteration: int) -> str:
        """Write Megatron's checkpoint; the digest of the weights."""
        with self._policy.weights() as module:
            save_weights(self._policy.stock, Path(directory), iteration=iteration)
            return weights_digest(module)

    def load(self, directory: str) -> int:
        """Read Megatron's checkpoint; its iteration."""
        return load_weights(self._policy.stock, Path(directory))

    def save_hf(self, directory: str) -> None:
        """Write the Hugging Face checkpoint."""
        self._policy.save_hf(Path(directory))
