"""The layout of a run: which ranks share a replica of the model, and which models they can share.

Megatron numbers its ranks tensor parallel first, then context, data and pipeline parallel ones;
experts are spread over the tensor and data parallel ranks of a stage. Free of torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from .config import ParallelConfig

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """Which rank is where. A replica is a whole model; its members are the ranks that share it.

    Example: `RankLayout(tp=2, pp=2, replicas=2).replica(4)` is 0: ranks 0, 1, 4 and 5 share one.
    """

    tp: int = 1
    pp: int = 1
    replicas: int = 1

    @property
    def members(self) -> int:
        """Ranks that share a replica."""
        return self.tp * self.pp

    @property
    def ranks(self) -> int:
        """Ranks of all replicas."""
        return self.members * self.replicas

    def replica(self, rank: int) -> int:
        """The replica that a rank has a part of: its data-parallel rank."""
        return rank // self.tp % self.replicas

    def member(self, rank: int) -> int:
        """The place of a rank among those of its replica, from 0."""
        return rank // (self.tp * self.replicas) * self.tp + rank % self.tp

    def ranks_of(self, replica: int) -> tuple[int, ...]:
        """The ranks of a replica, in the order of their places."""
        return tuple(rank for rank in range(self.ranks) if self.replica(rank) == replica)

    def share(self, items: Sequence[Item], rank: int) -> tuple[Item, ...]:
        """A rank's items: of its replica's, which are every `replicas`-th, every `members`-th."""
        return tuple(items[self.replica(rank) :: self.replicas][self.member(rank) :: self.members])

    @staticmethod
    def merge(shares: Sequence[Sequence[Item]]) -> list[Item]:
        """A replica's items in their order, from the shares of its members in theirs."""
        return list(_alternate(shares))


def _alternate(shares: Sequence[Sequence[Item]]) -> Iterator[Item]:
    for place in range(max(map(len, shares), default=0)):
        yield from (share[place] for share in shares if place < len(share))


class Named(NamedTuple):
    """A size of a model, and the name that its user knows it by."""

    name: str
    size: int


def misfit(
    parallel: ParallelConfig,
    *,
    layers: Named,
    heads: Named,
    query_groups: Named,
    ffn: Named,
    experts: Named,
) -> str:
    """Says why ranks cannot cut a model as `parallel` asks; empty where they can.

    `ffn` is the width that tensor-parallel ranks cut: of the block, or of an expert.
    Example: `misfit(parallel, layers=Named("model.layers", 2), ...)`.
    """
    stages = parallel.pp * parallel.vpp
    for key, size, by in (
        ("tp", parallel.tp, heads),
        ("tp", parallel.tp, query_groups),
        ("tp", parallel.tp, ffn),
        ("pp x vpp", stages, layers),
    ):
        if by.size % size:
            return f"parallel.{key} is {size} and {by.name} is {by.size}; allowed: a divisor of it"
    if parallel.ep > 1 and (not experts.size or experts.size % parallel.ep):
        return (
            f"parallel.ep is {parallel.ep} and {experts.name} is {experts.size}; allowed: a "
            "divisor of it, or 1 for a model without experts"
        )
    if experts.size and parallel.tp > 1 and not parallel.sequence_parallel:
        return (
            f"parallel.sequence_parallel is false, parallel.tp is {parallel.tp} and "
            f"{experts.name} is {experts.size}; allowed: true, which Megatron's experts need "
            "beside tensor parallelism"
        )
    return ""
