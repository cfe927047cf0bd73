"""The layout of ranks and replicas of the model.

Megatron numbers ranks by tensor, then context, data and pipeline parallelism; experts are spread
over the tensor- and data-parallel ranks of a stage. Importing the module does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """Maps ranks to replicas of the model, and distributes items such as prompts to ranks.

    The members of a replica are the ranks that together have one entire model.

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
        """The number of ranks that together have one replica."""
        return self.tp * self.cp * self.pp

    @property
    def ranks(self) -> int:
        """The number of ranks of all replicas together."""
        return self.members * self.replicas

    def replica(self, rank: int) -> int:
        """Return the index of the replica that a rank belongs to: its data-parallel rank."""
        return rank // (self.tp * self.cp) % self.replicas

    def member(self, rank: int) -> int:
        """Return the index of a rank within its replica, from 0."""
        of_stage = self.tp * self.cp
        return rank // (of_stage * self.replicas) * of_stage + rank % of_stage

    def ranks_of(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of a replica, ascending."""
        return tuple(rank for rank in range(self.ranks) if self.replica(rank) == replica)

    def share(self, items: Sequence[Item], rank: int) -> tuple[Item, ...]:
        """Return those of `items`, such as the prompts for all ranks, that are assigned to `rank`.

        Replica r gets items r, r + `replicas`, …; of those, its member m gets every `members`-th
        item, from the m-th on.
        """
        return tuple(items[self.replica(rank) :: self.replicas][self.member(rank) :: self.members])

    @staticmethod
    def merge(shares: Sequence[Sequence[Item]]) -> list[Item]:
        """Interleave the item lists of a replica's members, in order of member: the inverse of
        `share` within a replica.
        """
        longest = max(map(len, shares), default=0)
        return [share[index] for index in range(longest) for share in shares if index < len(share)]


class Replica:
    """The replica of the model that this rank belongs to, with the process group of its ranks.

    The replica's ranks sample and score different prompts, and train on all of them.

    Example: `replica.share(prompts)`.
    """

    def __init__(self, layout: RankLayout) -> None:
        """Make the replica's process group. All ranks call it, after Megatron has made its own
        groups.

        Raises:
            RuntimeError: Megatron numbers this rank differently.
        """
        import torch.distributed as dist
        from megatron.core import parallel_state

        rank = dist.get_rank()
        data_parallel_rank = int(parallel_state.get_data_parallel_rank())
        if data_parallel_rank != layout.replica(rank):
            raise RuntimeError(
                f"rank {rank} is data-parallel rank {data_parallel_rank} in Megatron, and "
                f"{layout.replica(rank)} in the layout of the run: leave Megatron's order of ranks "
                "as it is"
            )
        self._layout, self._rank = layout, rank
        groups = [list(layout.ranks_of(replica)) for replica in range(layout.replicas)]
        group, _ = dist.new_subgroups_by_enumeration(groups)
        assert isinstance(group, dist.ProcessGroup)  # each rank is in one of them
        self.group = group

    def share(self, items: Sequence[Item]) -> tuple[Item, ...]:
        """Return those of `items`, such as the prompts for all ranks, that are assigned to this
        rank; see `RankLayout.share`.
        """
        return self._layout.share(items, self._rank)

    def gather(self, results: Sequence[Item]) -> list[Item]:
        """Gather the results of all ranks of this replica; return them, on each of these ranks, in
        the order of the replica's items.

        A collective of the replica's ranks; each passes a result per item of its `share`.
        """
        if self._layout.members == 1:
            return list(results)
        import torch.distributed as dist

        shares: list[Sequence[Item]] = [()] * self._layout.members
        dist.all_gather_object(shares, tuple(results), group=self.group)
        return self._layout.merge(shares)
