"""The records of one call on a rank, and small rules that all of its parts use."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backend import Backend
from .combine import Whole
from .sampling import Sampling


class Columns(NamedTuple):
    """The vocabulary, and this rank's part of it."""

    first: int
    """The id of this rank's first column."""
    real: int
    """The number of its columns that are tokens; those after them are padding."""
    per_rank: int
    vocabulary: int
    """Tokens on all ranks."""
    group: Any
    ranks: int

    def real_of(self, rank: int) -> int:
        """Returns the number of columns of that rank that are tokens."""
        return min(self.per_rank, max(0, self.vocabulary - rank * self.per_rank))


class Wanted(NamedTuple):
    """The options of a computation."""

    entropy: bool
    entropy_gradient: bool
    consume: bool
    backend: Backend
    workspace_bytes: int

    def returned(
        self, ctx: Any, whole: Whole, temperature: Tensor | float
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """`(logprob, entropy, lse)`, of which the gradient is known for what is differentiated."""
        lse_N = whole.origin / temperature + whole.log_sum
        # Copies, because callers may change in place what the backward has saved.
        entropy_N = whole.entropy.clone() if self.entropy else None
        constant = [lse_N]
        if entropy_N is not None and not self.entropy_gradient:
            constant.append(entropy_N)
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return whole.logprob.clone(), entropy_N, lse_N


class Asked(NamedTuple):
    """The inputs of the tokens that are computed, in the order of their rows."""

    targets: Tensor
    """Ids in the vocabulary, [N]."""
    temperature: Tensor | float
    """The temperature of all tokens, or [N]."""
    columns: Columns
    wanted: Wanted
    sampling: Sampling | None = None
    """The sampler, if it leaves something out."""
    keep: Tensor | None = None
    """`Sampling.keep` of these tokens, [N, K]."""

    @property
    def local(self) -> Tensor:
        """The target's column on this rank, or one that this rank has not; [N]."""
        return self.targets - self.columns.first

    @property
    def owner(self) -> Tensor:
        """The rank in the group that has the target's column; [N]."""
        return self.targets // self.columns.per_rank


def temperature_of(temperature: Tensor | float, tokens: slice | Tensor) -> Tensor | float:
    """Returns the temperature of some tokens, if each token has its own."""
    return temperature[tokens] if isinstance(temperature, Tensor) else temperature


def divides_nothing(temperature: Tensor | float) -> bool:
    """Returns whether the temperature is 1, so that logits need no division."""
    return not isinstance(temperature, Tensor) and temperature == 1


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which logits of this type are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_ours(local: Tensor, columns: int) -> Tensor:
    """Returns a mask of the columns that are among the first `columns`, those of this rank."""
    return (local >= 0) & (local < columns)


def place_of(local_n: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The target's column here, any where it is another rank's, and whether it is ours; [n, 1]."""
    ours_n = is_ours(local_n, columns)
    return torch.where(ours_n, local_n, 0)[:, None], ours_n[:, None]
