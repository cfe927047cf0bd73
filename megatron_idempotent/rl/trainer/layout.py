"""Says which ranks share a replica of the model, and which models they can share.

Megatron numbers its ranks tensor parallel first, then context, data and pipeline parallel ones;
experts are spread over the tensor and data parallel ranks of a stage. Importing the module does not
import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """Says which replica each rank belongs to, and which items it takes.

    A replica is a whole model; its members are the ranks that share it.
    Example: `RankLayout(tp=2, pp=2, replicas=2).replica(4)` is 0. Ranks 0, 1, 4 and 5 share it.
    """

    tp: int = 1
    """Tensor-parallel ranks of a replica."""
    cp: int = 1
    """Context-parallel ranks of a replica."""
    pp: int = 1
    """Pipeline stages of a replica."""
    replicas: int = 1
    """Number of replicas."""

    @property
    def members(self) -> int:
        """The number of ranks that share a replica."""
        return self.tp * self.cp * self.pp

    @property
    def ranks(self) -> int:
        """The number of ranks of all replicas."""
        return self.members * self.replicas

    def replica(self, rank: int) -> int:
        """Return the replica of which a rank has a part: its data-parallel rank."""
        return rank // (self.tp * self.cp) % self.replicas

    def member(self, rank: int) -> int:
        """Return the number of a rank among those of its replica, from 0."""
        of_stage = self.tp * self.cp
        return rank // (of_stage * self.replicas) * of_stage + rank % of_stage

    def ranks_of(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of a replica, ascending."""
        return tuple(rank for rank in range(self.ranks) if self.replica(rank) == replica)

    def share(self, items: Sequence[Item], rank: int) -> tuple[Item, ...]:
        """Return a rank's items.

        Replica r has items r, r + `replicas`, …; member m of it has items m, m + `members`, … of
        those.
        """
        return tuple(items[self.replica(rank) :: self.replicas][self.member(rank) :: self.members])

    @staticmethod
    def merge(shares: Sequence[Sequence[Item]]) -> list[Item]:
        """Return a replica's items in their order, given the shares of its members, in order."""
        longest = max(map(len, shares), default=0)
        return [share[at] for at in range(longest) for share in shares if at < len(share)]


class Replica:
    """Knows the replica that this rank has a part of, and its other ranks.

    These ranks sample and score different prompts, and train on all of them.
    Example: `replica.share(prompts)`.
    """

    def __init__(self, layout: RankLayout) -> None:
        """Make the replica's process group. Collective over all ranks, after Megatron's groups.

        Errors: `RuntimeError` if Megatron has numbered this rank differently.
        """
        import torch.distributed as dist
        from megatron.core import parallel_state

        rank = dist.get_rank()
        found = int(parallel_state.get_data_parallel_rank())
        if found != layout.replica(rank):
            raise RuntimeError(
                f"rank {rank} is data-parallel rank {found} in Megatron, and "
                f"{layout.replica(rank)} in the layout of the run: leave Megatron's order of ranks "
                "as it is"
            )
        self._layout, self._rank = layout, rank
        groups = [list(layout.ranks_of(replica)) for replica in range(layout.replicas)]
        group, _ = dist.new_subgroups_by_enumeration(groups)
        assert isinstance(group, dist.ProcessGroup)  # each rank is in one of them
        self.group = group

    def share(self, items: Sequence[Item]) -> tuple[Item, ...]:
        """Return this rank's items, given those of all ranks."""
        return self._layout.share(items, self._rank)

    def gather(self, mine: Sequence[Item]) -> list[Item]:
        """Return all items of the replica, in order, given one for each item of a rank's share.

        Collective over the ranks of the replica.
        """
        if self._layout.members == 1:
            return list(mine)
        import torch.distributed as dist

        shares: list[Sequence[Item]] = [()] * self._layout.members
        dist.all_gather_object(shares, tuple(mine), group=self.group)
        return self._layout.merge(shares)
