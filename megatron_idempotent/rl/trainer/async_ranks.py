"""The policy of an asynchronous run: the controller's proxy, and the worker on each rank."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch

from megatron_idempotent.proof.cpu import PROGRAM_PRELOAD, RankPool
from megatron_idempotent.rl.controller import LogprobsOf, StepOutcome
from megatron_idempotent.rl.sync import Exports
from megatron_idempotent.rl.workers import EmbeddedRanks, RankGroup, WorkerSpec

from .batch import Batch
from .checkpoint import load_weights, save_weights
from .layout import RankLayout
from .output import Job
from .policy import start_policy


@dataclasses.dataclass(frozen=True, slots=True)
class RankPolicy:
    """Implements `controller.OneShotPolicy` in the controller's process, by calls of `PolicyWorker`
    on all ranks.

    Row i of a batch always goes to replica i modulo the number of replicas.

    Raises:
        RanksLost: by every method, if a call takes longer than `timeout_s` or ranks are gone.
        RankFailed: by every method, if a rank raised an error.

    Example: `await RankPolicy(ranks, config.layout, timeout_s=600.0).begin("run/0/0")`.
    """

    ranks: RankGroup
    """The ranks of the policy."""
    layout: RankLayout
    """The layout of ranks and replicas."""
    timeout_s: float
    """Seconds for a call, after which the ranks count as lost."""
    meet: bool = False
    """True if the forwards of all replicas are collective, as with experts that are spread over
    replicas."""

    async def begin(self, step_id: str) -> None:
        """Open an optimizer step on all ranks; see `controller.Policy.begin`."""
        await self._call("begin", step_id)

    async def logprobs(self, batch: Batch, which: LogprobsOf) -> torch.Tensor:
        """Compute log-probs of the batch's targets on the ranks; return them [B, T] in the order of
        the batch's rows, 0 where the mask is 0.
        """
        replicas = self.layout.replicas
        shares = self._shares(batch)
        if self.meet:
            # All replicas must enter each forward, even those with fewer rows.
            shares = [share.padded(-(-len(batch) // replicas)) for share in shares]
        parts: list[torch.Tensor] = await self._call("logprobs", which, per_rank=shares)
        logprobs_BT = torch.empty_like(batch.old_logprobs_BT)
        for replica in range(replicas):
            rows_BT = logprobs_BT[replica::replicas]
            rows_BT.copy_(parts[self.layout.ranks_of(replica)[0]][: len(rows_BT)])
        return logprobs_BT

    async def microbatch(
        self, step_id: str, batch: Batch, *, microbatch_id: str, last: bool
    ) -> None:
        """Run forward and backward on the batch's rows, split over the replicas; see
        `controller.Policy.microbatch`.
        """
        shares = self._shares(batch)
        await self._call("microbatch", step_id, microbatch_id, last, per_rank=shares)

    async def finish(self, step_id: str) -> StepOutcome:
        """Reduce gradients and update the weights; return rank 0's outcome. See
        `controller.Policy.finish`.
        """
        outcomes: list[StepOutcome] = await self._call("finish", step_id)
        return outcomes[0]

    async def train(self, step_id: str, batch: Batch) -> StepOutcome:
        """Take an entire optimizer step on the batch, by one call of `PolicyWorker.train` on all
        ranks.
        """
        outcomes: list[StepOutcome] = await self._call(
            "train", step_id, per_rank=self._shares(batch)
        )
        return outcomes[0]

    async def abort(self, step_id: str | None = None) -> None:
        """Undo the open step on all ranks, if there is one."""
        await self._call("abort", step_id)

    def _shares(self, batch: Batch) -> list[Batch]:
        """Split a batch's rows over the replicas; return a list with one batch for each rank. Ranks
        of one replica get the same rows.
        """
        layout = self.layout
        if layout.replicas == 1:
            return [batch] * layout.ranks
        # A replica may get no row, as when a batch has one group of which samples failed.
        row_indices = torch.arange(len(batch))
        shares = [
            batch.rows(row_indices[first :: layout.replicas]) for first in range(layout.replicas)
        ]
        return [shares[layout.replica(rank)] for rank in range(layout.ranks)]

    async def _call(self, method: str, *args: Any, per_rank: Any = None) -> list[Any]:
        return await self.ranks.call(method, *args, per_rank=per_rank, timeout_s=self.timeout_s)


class PolicyWorker(Exports):
    """Trains the policy on one rank: its methods are what the controller calls on all ranks.

    All methods are collectives of the default group.

    Example: `WorkerSpec(factory="megatron_idempotent.rl.trainer.async_ranks:PolicyWorker",
    argument=job)`.
    """

    def __init__(self, job: Job) -> None:
        """Build the job's model and optimizer on this rank."""
        self._policy, *_ = start_policy(job)
        super().__init__(
            self._policy.source(
                deltas=job.config.sync.deltas, senders=job.config.sync.senders or None
            )
        )

    def begin(self, step_id: str) -> None:
        """Open an optimizer step with the id `step_id` on this rank."""
        self._policy.begin(step_id)

    def logprobs(self, which: LogprobsOf, batch: Batch) -> torch.Tensor:
        """Return log-probs [B, T] of the targets in this replica's rows; 0 where the loss mask is
        0.
        """
        return self._policy.logprobs(batch, which)

    def microbatch(self, step_id: str, microbatch_id: str, last: bool, batch: Batch) -> None:
        """Run forward and backward on this replica's rows, as a part of the open step."""
        self._policy.microbatch(step_id, batch, microbatch_id=microbatch_id, last=last)

    def finish(self, step_id: str) -> StepOutcome:
        """Reduce the open step's gradients and update the weights; return the outcome over all
        ranks.
        """
        result = self._policy.step.finish(step_id)
        metrics: dict[str, float] = dict(result.metrics)
        metrics["learning_rate"] = result.lr
        if result.grad_norm is not None:
            metrics["grad_norm"] = result.grad_norm
        metrics |= self._policy.routing_metrics()
        return StepOutcome(
            updated=result.updated, tokens=int(result.global_valid_tokens), metrics=metrics
        )

    def train(self, step_id: str, batch: Batch) -> StepOutcome:
        """Take an entire optimizer step on this replica's rows; return its outcome over all ranks.

        Repeating a step that was taken only returns its outcome. If an error is raised, the step is
        undone on all ranks.
        """
        self.begin(step_id)
        try:
            if self._policy.step.open_step_id == step_id:  # else the step was already taken
                self.microbatch(step_id, f"{step_id}/0", True, batch)
            return self.finish(step_id)
        except Exception:
            # All ranks come here: a failure on one raises on the others, too.
            self._policy.step.abort()
            raise

    def abort(self, step_id: str | None) -> None:
        """Undo the open step; the id is ignored, because the controller has one step at a time."""
        self._policy.step.abort()

    def save(self, directory: str, iteration: int) -> str:
        """Write a Megatron checkpoint to `directory`; return a SHA-256 digest of the entire model's
        weights. A collective.
        """
        return save_weights(self._policy, Path(directory), iteration=iteration)

    def load(self, directory: str) -> int:
        """Load the Megatron checkpoint in `directory`; return the iteration at which it was
        written.
        """
        return load_weights(self._policy.stock, Path(directory))

    def save_hf(self, directory: str) -> None:
        """Write the weights to `directory` as a Hugging Face checkpoint."""
        self._policy.save_hf(Path(directory))


FACTORY = "megatron_idempotent.rl.trainer.async_ranks:PolicyWorker"
#: Modules that the launcher imports once, so that ranks need not import them.
PRELOAD = (*PROGRAM_PRELOAD, "megatron_idempotent.rl.trainer.async_ranks")


def make_ranks(job: Job, *, pool: RankPool | None = None) -> RankGroup:
    """Return the group of training ranks that the configuration asks for: local processes or Ray
    actors, which are not started yet.

    `pool` is an existing launcher for embedded ranks; None to make one.
    """
    size, controller = job.config.run.ranks, job.config.controller
    spec = WorkerSpec(
        factory=FACTORY,
        # Absolute, because ranks may run in other folders.
        argument=dataclasses.replace(job, out=job.out.absolute()),
    )
    if controller.cluster == "ray":
        from megatron_idempotent.rl.workers.ray import RayRanks

        cpus, gpus = controller.cpus_per_rank, controller.gpus_per_rank
        return RayRanks(spec, size, num_cpus=cpus, num_gpus=gpus)
    # One thread per rank: the ranks use all cores, and sums have a fixed order.
    os.environ["OMP_NUM_THREADS"] = "1"
    return EmbeddedRanks(
        spec,
        size,
        log_dir=job.out / "logs",
        pool=pool,
        preload=PRELOAD,
        device=job.config.run.device,
    )
