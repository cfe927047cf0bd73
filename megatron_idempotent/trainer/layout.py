"""The layout of a run: which ranks share a replica of the model, and which models they can share.

Megatron numbers its ranks tensor parallel first, then context, data and pipeline parallel ones;
experts are spread over the tensor and data parallel ranks of a stage. Free of torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from megatron_idempotent.settings import Field, settings

from .errors import ConfigError

if TYPE_CHECKING:
    from .config import Config

Item = TypeVar("Item")


@settings(ConfigError, "parallel.")
class ParallelConfig:
    """The layout: how ranks share a replica of the model. Example: `ParallelConfig(tp=2, pp=2)`."""

    tp: int = Field(default=1, ge=1, le=64)
    """Tensor-parallel ranks; they cut heads, feed-forward blocks and the vocabulary."""
    pp: int = Field(default=1, ge=1, le=64)
    """Pipeline stages; they cut the layers."""
    cp: int = Field(default=1, ge=1, le=64)
    """Context-parallel ranks; they cut the positions of each sequence."""
    vpp: int = Field(default=1, ge=1, le=64)
    """Chunks of layers on each pipeline stage; above 1 the schedule is interleaved."""
    ep: int = Field(default=1, ge=1, le=64)
    """Expert-parallel ranks; they cut the experts, and are those of several replicas, or of one
    that context-parallel ranks share."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks cut the positions too, where they have nothing else to cut."""

    def __post_init__(self) -> None:
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"parallel.vpp is {self.vpp} and parallel.pp is 1; allowed: 2 or more stages, "
                "between which chunks alternate, or vpp = 1"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "parallel.sequence_parallel is true and parallel.tp is 1; allowed: 2 or more "
                "ranks, which cut the positions, or false"
            )

    @property
    def is_whole(self) -> bool:
        """True where every rank has the whole model."""
        return self.tp == self.pp == self.ep == 1

    @property
    def members(self) -> int:
        """Ranks that share a replica."""
        return self.tp * self.cp * self.pp

    def rounded(self, positions: int) -> int:
        """The length of training sequences that ranks can cut, from the least that is needed."""
        by = (self.tp if self.sequence_parallel else 1) * (2 * self.cp if self.cp > 1 else 1)
        return -(-positions // by) * by


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """Tells which rank is where; a replica is a whole model, its members the ranks that share it.

    Example: `RankLayout(tp=2, pp=2, replicas=2).replica(4)` is 0. Ranks 0, 1, 4 and 5 share one.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    replicas: int = 1

    @property
    def members(self) -> int:
        """Ranks that share a replica."""
        return self.tp * self.cp * self.pp

    @property
    def ranks(self) -> int:
        """Ranks of all replicas."""
        return self.members * self.replicas

    def replica(self, rank: int) -> int:
        """The replica that a rank has a part of: its data-parallel rank."""
        return rank // (self.tp * self.cp) % self.replicas

    def member(self, rank: int) -> int:
        """The place of a rank among those of its replica, from 0."""
        of_stage = self.tp * self.cp
        return rank // (of_stage * self.replicas) * of_stage + rank % of_stage

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


def check_layout(config: Config) -> None:
    """Check that ranks, model and microbatches divide into the layout that is asked for.

    Errors: `ValueError` with both numbers. A checkpoint's model is checked where it is read.
    """
    parallel, model, ranks = config.parallel, config.model, config.run.ranks
    if ranks % parallel.members:
        raise ValueError(
            f"parallel.tp x cp x pp is {parallel.members} and run.ranks is {ranks}; "
            "allowed: a divisor of run.ranks"
        )
    apart = config.replicas * parallel.cp
    if apart % parallel.ep:
        raise ValueError(
            f"parallel.ep is {parallel.ep} and run.ranks / (tp x pp) is {apart}; allowed: a "
            "divisor of it, because experts are cut over replicas and context-parallel ranks"
        )
    if not model.path:
        ffn = Named("model.ffn", model.ffn)
        wrong = misfit(
            parallel,
            layers=Named("model.layers", model.layers),
            heads=Named("model.heads", model.heads),
            query_groups=Named("model.query_groups", model.query_groups),
            ffn=Named("model.expert_ffn", model.expert_ffn) if model.num_experts else ffn,
            experts=Named("model.num_experts", model.num_experts),
        )
        if wrong:
            raise ValueError(wrong)
    together = config.optimizer.microbatches_per_step // config.chunks
    if parallel.vpp > 1 and together % parallel.pp:
        raise ValueError(
            f"optimizer.microbatches_per_step / chunks_per_step is {together} and parallel.pp "
            f"is {parallel.pp}; allowed: a multiple of it, which an interleaved schedule takes"
        )
