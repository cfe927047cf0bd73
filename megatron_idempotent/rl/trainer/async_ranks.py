"""Implements the policy of an asynchronous run: the controller's side, and the worker on a rank."""

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


class RankPolicy:
    """Implements `controller.OneShotPolicy` with ranks that each hold a `PolicyWorker`.

    Row i of a batch always goes to replica i modulo the number of replicas.
    Example: `await RankPolicy(ranks, config.layout, timeout_s=600.0).begin("run/0/0")`.
    Errors of every method: `RanksLost` after `timeout_s`, and what a rank raised.
    """

    def __init__(
        self, ranks: RankGroup, layout: RankLayout, *, timeout_s: float, meet: bool = False
    ) -> None:
        """
        Args:
            ranks: the ranks that hold the policy.
            layout: says which replica each rank belongs to.
            timeout_s: seconds that a call may take; after that the ranks count as lost.
            meet: True if replicas exchange data inside of the model, as with experts that are cut
                over replicas.
        """
        self._ranks = ranks
        self._layout = layout
        self._timeout_s = timeout_s
        self._meet = meet

    async def begin(self, step_id: str) -> None:
        """Open an optimizer step on all ranks; see `controller.Policy.begin`."""
        await self._call("begin", step_id)

    async def logprobs(self, batch: Batch, which: LogprobsOf) -> torch.Tensor:
        """Compute log-probs [B, T] of the targets, 0 where the loss mask is 0."""
        replicas = self._layout.replicas
        shares = self._shares(batch)
        if self._meet:
            # Each forward has all of them in it, also those that have fewer rows.
            shares = [share.padded(-(-len(batch) // replicas)) for share in shares]
        parts: list[torch.Tensor] = await self._call("logprobs", which, per_rank=shares)
        found_BT = torch.empty_like(batch.old_logprobs_BT)
        for replica in range(replicas):
            mine_BT = found_BT[replica::replicas]
            mine_BT.copy_(parts[self._layout.ranks_of(replica)[0]][: len(mine_BT)])
        return found_BT

    async def microbatch(
        self, step_id: str, batch: Batch, *, microbatch_id: str, last: bool
    ) -> None:
        """Run forward and backward of the batch's rows; see `controller.Policy.microbatch`."""
        shares = self._shares(batch)
        await self._call("microbatch", step_id, microbatch_id, last, per_rank=shares)

    async def finish(self, step_id: str) -> StepOutcome:
        """Reduce gradients and update the weights; see `controller.Policy.finish`."""
        outcomes: list[StepOutcome] = await self._call("finish", step_id)
        return outcomes[0]

    async def train(self, step_id: str, batch: Batch) -> StepOutcome:
        """Take an optimizer step over the batch's rows, in one call of the ranks."""
        outcomes: list[StepOutcome] = await self._call(
            "train", step_id, per_rank=self._shares(batch)
        )
        return outcomes[0]

    async def abort(self, step_id: str | None = None) -> None:
        """Undo the open step; do nothing if none is open."""
        await self._call("abort", step_id)

    def _shares(self, batch: Batch) -> list[Batch]:
        """Return the rows of each rank; ranks of one replica have the same rows."""
        layout = self._layout
        if layout.replicas == 1:
            return [batch] * layout.ranks
        # Some may get no row: a batch of one group, of which samples failed, on many ranks.
        places = torch.arange(len(batch))
        shares = [batch.rows(places[first :: layout.replicas]) for first in range(layout.replicas)]
        return [shares[layout.replica(rank)] for rank in range(layout.ranks)]

    async def _call(self, method: str, *args: Any, per_rank: Any = None) -> list[Any]:
        return await self._ranks.call(method, *args, per_rank=per_rank, timeout_s=self._timeout_s)


class PolicyWorker(Exports):
    """Holds the policy on one rank, and carries out the controller's calls.

    All methods are collective: every rank of the default group is called, in the same order.
    Example: `WorkerSpec(factory="megatron_idempotent.rl.trainer.async_ranks:PolicyWorker",
    argument=job)`.
    """

    def __init__(self, job: Job) -> None:
        """Build the model and the optimizer of the run that the job describes."""
        self._policy, *_ = start_policy(job)
        super().__init__(
            self._policy.source(
                deltas=job.config.sync.deltas, senders=job.config.sync.senders or None
            )
        )

    def begin(self, step_id: str) -> None:
        """Open an optimizer step."""
        self._policy.begin(step_id)

    def logprobs(self, which: LogprobsOf, batch: Batch) -> torch.Tensor:
        """Compute log-probs [B, T] of this replica's rows, 0 where the loss mask is 0."""
        return self._policy.logprobs(batch, which)

    def microbatch(self, step_id: str, microbatch_id: str, last: bool, batch: Batch) -> None:
        """Run forward and backward of this replica's rows."""
        self._policy.microbatch(step_id, batch, microbatch_id=microbatch_id, last=last)

    def finish(self, step_id: str) -> StepOutcome:
        """Reduce gradients and update the weights; return the outcome over all ranks."""
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
        """Take an optimizer step over this replica's rows; return its outcome.

        A step that was taken already is not taken again: its outcome is returned once more. If it
        raises, the step is undone on all ranks.
        """
        self.begin(step_id)
        try:
            if (
                self._policy.step.open_step_id == step_id
            ):  # else it was made, and is asked for again
                self.microbatch(step_id, f"{step_id}/0", True, batch)
            return self.finish(step_id)
        except Exception:
            # All ranks come here: the others hear of a failure where they would wait for this one.
            self._policy.step.abort()
            raise

    def abort(self, step_id: str | None) -> None:
        """Undo the open step, whatever its id: the controller has one at a time."""
        self._policy.step.abort()

    def save(self, directory: str, iteration: int) -> str:
        """Write Megatron's checkpoint; return the digest of the weights."""
        return save_weights(self._policy, Path(directory), iteration=iteration)

    def load(self, directory: str) -> int:
        """Load Megatron's checkpoint; return the iteration that it was written with."""
        return load_weights(self._policy.stock, Path(directory))

    def save_hf(self, directory: str) -> None:
        """Write the weights as a Hugging Face checkpoint."""
        self._policy.save_hf(Path(directory))


FACTORY = "megatron_idempotent.rl.trainer.async_ranks:PolicyWorker"
#: Modules that the launcher imports once, so that no rank imports them when it starts.
PRELOAD = (*PROGRAM_PRELOAD, "megatron_idempotent.rl.trainer.async_ranks")


def worker_spec(job: Job) -> WorkerSpec:
    """Describe the worker of every rank, with absolute paths: ranks may run in other folders."""
    return WorkerSpec(factory=FACTORY, argument=dataclasses.replace(job, out=job.out.absolute()))


def make_ranks(job: Job, *, pool: RankPool | None = None) -> RankGroup:
    """Make the ranks that the configuration asks for, embedded or on Ray.

    They are not started yet. `pool` is a launcher that forks embedded ranks; None for one of their
    own.
    """
    size, controller = job.config.run.ranks, job.config.controller
    if controller.cluster == "ray":
        from megatron_idempotent.rl.workers.ray import RayRanks

        return RayRanks(
            worker_spec(job),
            size,
            num_cpus=controller.cpus_per_rank,
            num_gpus=controller.gpus_per_rank,
        )
    # One thread per rank: the ranks are what fills the cores, and one thread adds up in one order.
    os.environ["OMP_NUM_THREADS"] = "1"
    return EmbeddedRanks(
        worker_spec(job),
        size,
        log_dir=job.out / "logs",
        pool=pool,
        preload=PRELOAD,
        device=job.config.run.device,
    )
