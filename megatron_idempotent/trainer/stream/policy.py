"""The policy as the controller sees it: calls on all ranks, each with its rows."""

from __future__ import annotations

from typing import Any

import torch

from megatron_idempotent.controller import LogprobsOf, StepOutcome
from megatron_idempotent.trainer.policy.batch import Batch
from megatron_idempotent.workers import RankGroup


class RankPolicy:
    """A `controller.Policy` over ranks that hold `stream.worker.PolicyWorker`.

    Row i of a batch goes to rank i modulo their number, whatever else happens.
    Example: `await RankPolicy(ranks, timeout_s=600.0).begin("run/0/0")`.
    """

    def __init__(self, ranks: RankGroup, *, timeout_s: float) -> None:
        """`timeout_s` limits every call: after it the ranks count as lost."""
        self._ranks = ranks
        self._timeout_s = timeout_s

    async def begin(self, step_id: str) -> None:
        """See `controller.Policy`, as for the others."""
        await self._call("begin", step_id)

    async def logprobs(self, batch: Batch, which: LogprobsOf) -> torch.Tensor:
        """Log-probs [B, T], 0 where the loss mask is."""
        parts: list[torch.Tensor] = await self._call(
            "logprobs", which, per_rank=_shares(batch, self._ranks.size)
        )
        found_BT = torch.empty_like(batch.old_logprobs_BT)
        for rank, part_BT in enumerate(parts):
            found_BT[rank :: self._ranks.size] = part_BT
        return found_BT

    async def microbatch(
        self, step_id: str, batch: Batch, *, microbatch_id: str, last: bool
    ) -> None:
        """Forward and backward of the batch's rows."""
        await self._call(
            "microbatch",
            step_id,
            microbatch_id,
            last,
            per_rank=_shares(batch, self._ranks.size),
        )

    async def finish(self, step_id: str) -> StepOutcome:
        """One reduction and one update."""
        outcomes: list[StepOutcome] = await self._call("finish", step_id)
        return outcomes[0]

    async def abort(self, step_id: str | None = None) -> None:
        """Undo an open step; one that was never begun is none."""
        await self._call("abort", step_id)

    async def _call(self, method: str, *args: Any, per_rank: Any = None) -> list[Any]:
        return await self._ranks.call(method, *args, per_rank=per_rank, timeout_s=self._timeout_s)


def _shares(batch: Batch, ranks: int) -> list[Batch]:
    if ranks == 1:
        return [batch]
    # Some may get no row: a batch of one group, of which samples failed, on many ranks.
    places = torch.arange(len(batch))
    return [batch.rows(places[rank::ranks]) for rank in range(ranks)]
