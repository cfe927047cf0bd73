"""Says which ranks share a replica of the model, and which models they can share.

Megatron numbers its ranks tensor parallel first, then context, data and pipeline parallel ones;
experts are spread over the tensor and data parallel ranks of a stage. The module does not import
torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from megatron_idempotent.settings import Field, settings

from .errors import ConfigError

if TYPE_CHECKING:
    from .config import Config

Item = TypeVar("Item")


@settings(ConfigError, "parallel.")
class ParallelConfig:
    """Sets how ranks share a replica of the model. Example: `ParallelConfig(tp=2, pp=2)`."""

    tp: int = Field(default=1, ge=1, le=64)
    """Tensor-parallel ranks; they cut heads, feed-forward blocks and the vocabulary."""
    pp: int = Field(default=1, ge=1, le=64)
    """Pipeline stages; they cut the layers."""
    cp: int = Field(default=1, ge=1, le=64)
    """Context-parallel ranks; they cut the positions of each sequence."""
    vpp: int = Field(default=1, ge=1, le=64)
    """Model chunks on each pipeline stage; above 1 the schedule is interleaved."""
    ep: int = Field(default=1, ge=1, le=64)
    """Expert-parallel ranks; they cut the experts. They are ranks of several replicas, or the
    context-parallel ranks of one."""
    sequence_parallel: bool = False
    """True to have tensor-parallel ranks cut the positions too, outside of attention and
    feed-forward blocks."""

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
        """True if every rank has the whole model."""
        return self.tp == self.pp == self.ep == 1

    @property
    def members(self) -> int:
        """The number of ranks that share a replica."""
        return self.tp * self.cp * self.pp

    def rounded(self, positions: int) -> int:
        """Return the least length from `positions` on into which ranks can cut sequences evenly."""
        by = (self.tp if self.sequence_parallel else 1) * (2 * self.cp if self.cp > 1 else 1)
        return -(-positions // by) * by


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


class Named(NamedTuple):
    """Holds a size of a model, with its name in the user's configuration."""

    name: str
    """The key, such as `model.layers` or `num_hidden_layers`."""
    size: int
    """Its value."""


def misfit(
    parallel: ParallelConfig,
    *,
    layers: Named,
    heads: Named,
    query_groups: Named,
    ffn: Named,
    experts: Named,
) -> str:
    """Say why ranks cannot cut a model as `parallel` asks, or return "" if they can.

    `ffn` is the width of a feed-forward block or, in a model with experts, of an expert; 0 experts
    are none.
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
    """Check that the configured layout divides ranks, model and microbatches evenly.

    It does not check the model of a checkpoint, which it does not read.
    Errors: `ValueError`, with both numbers.
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
