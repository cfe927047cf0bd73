"""Holds the records of one call on a rank: its tokens, its options, and the sampler's vocabulary.

Legend: n tokens, W candidates.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_idempotent.kernel_choice import uses_triton

from .statistics import FINITE, Whole, per_row

#: Types of ids that callers may have; they are computed as int64.
ID_DTYPES = (torch.int64, torch.int32)

#: Columns beside the k-th that may have its logit.
_TIES = 32
_CANDIDATES = 128


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sampling:
    """Describes the set of tokens from which each token was sampled.

    The set is made as engines make it: logits are divided by the temperature, the `top_k` most
    probable tokens are kept, and of those the fewest that together have `top_p` of the probability
    that was kept. Tokens with the same logit as the last of them are kept too. Or `keep` names the
    set, as an engine reports it: then no boundary is computed, on which engine and trainer could
    differ.

    Example: `Sampling(top_p=0.95, target="-inf")`.
    """

    top_k: int | None = 0
    """The number of tokens to keep, 1 or more; 0, -1 or None for all."""
    top_p: float = 1.0
    """The probability to keep, in (0, 1]; 1 for all."""
    keep: Tensor | None = None
    """[..., K] of int64 or int32: the ids that are kept for each token, in any order; negative
    entries fill up tokens that keep fewer."""
    target: Literal["keep", "-inf"] = "keep"
    """The treatment of a target that is not kept: "keep" adds it to those that are, "-inf" gives it
    that log-prob and no gradient."""
    candidates: int | None = None
    """The number of columns that each rank sends; None for 32 more than `top_k`, or 128. If they do
    not suffice for a token, eight times as many are sent, and so on."""

    def __post_init__(self) -> None:
        def refuse(name: str, known: str) -> None:
            raise ValueError(f"Sampling() got {name}={getattr(self, name)!r}: {known}")

        whole = self.top_k is None or (isinstance(self.top_k, int) and self.top_k >= -1)
        if isinstance(self.top_k, bool) or not whole:
            refuse("top_k", "pass a number of tokens; 0, -1 or None for all")
        number = isinstance(self.top_p, (int, float)) and not isinstance(self.top_p, bool)
        if not number or not 0 < self.top_p <= 1:
            refuse("top_p", "pass a probability above 0; 1 for all")
        if self.target not in ("keep", "-inf"):
            refuse("target", "pass 'keep' or '-inf'")
        if self.candidates is not None and (
            isinstance(self.candidates, bool)
            or not isinstance(self.candidates, int)
            or self.candidates < 1
        ):
            refuse("candidates", "pass at least 1, or None")
        if self.keep is None:
            return
        if (
            not isinstance(self.keep, Tensor)
            or self.keep.dtype not in ID_DTYPES
            or not self.keep.dim()
        ):
            found = getattr(self.keep, "dtype", type(self.keep).__name__)
            raise ValueError(
                f"Sampling() got keep of {found}: pass a tensor of int64 or int32, [..., ids]"
            )
        if self.limit > 0 or self.top_p < 1:
            raise ValueError(
                f"Sampling() got keep, top_k={self.top_k} and top_p={self.top_p}: keep has what "
                "they left already, so leave them out"
            )

    @property
    def limit(self) -> int:
        """The number of tokens to keep, or 0 for all."""
        return max(self.top_k or 0, 0)

    def cuts(self, vocabulary: int) -> bool:
        """Return whether it leaves out any token of a vocabulary of that size."""
        return self.keep is not None or self.top_p < 1 or 0 < self.limit < vocabulary

    def width(self) -> int:
        """Return the number of columns that each rank sends as candidates."""
        if self.candidates is not None:
            return self.candidates
        return self.limit + _TIES if self.limit else _CANDIDATES

    def thresholds(
        self,
        logits_nW: Tensor,
        mass_n: Tensor,
        beyond_n: Tensor | None,
        temperature: Tensor | float,
    ) -> tuple[Tensor, Tensor]:
        """Return the lowest logit that is kept, and whether that is known for sure; both [n].

        `logits_nW` are all ranks' candidates. `mass_n`, which counts without top-k only, is
        Σ exp((logit - max) / temperature) over the whole vocabulary, in float64. No logit that is
        not a candidate is above `beyond_n`, which is None if all are candidates.
        """
        ordered_nW = logits_nW.sort(-1, descending=True).values
        lowest_n = ordered_nW.new_full((len(ordered_nW),), -torch.inf)
        sure_n = torch.ones_like(lowest_n, dtype=torch.bool)
        if self.limit:
            lowest_n = ordered_nW[:, min(self.limit, ordered_nW.shape[1]) - 1]
            sure_n = _nothing_beyond(lowest_n, beyond_n)
        if self.top_p >= 1:
            return lowest_n, sure_n
        z_nW = (ordered_nW.double() - ordered_nW[:, :1].clamp(min=FINITE)) / per_row(temperature)
        mass_nW = z_nW.exp().masked_fill_(ordered_nW < lowest_n[:, None], 0)
        if self.limit:
            mass_n = mass_nW.sum(-1)
        before_nW = mass_nW.cumsum(-1) - mass_nW
        count_n = (before_nW < self.top_p * mass_n[:, None]).sum(-1).clamp(min=1)
        last_n = ordered_nW.gather(1, count_n[:, None] - 1).squeeze(1)
        return torch.maximum(lowest_n, last_n), sure_n & _nothing_beyond(last_n, beyond_n)


def _nothing_beyond(lowest_n: Tensor, beyond_n: Tensor | None) -> Tensor:
    """Return whether no further column can have such a logit; -inf counts as no logit."""
    if beyond_n is None:
        return torch.ones_like(lowest_n, dtype=torch.bool)
    return (lowest_n > beyond_n) | (beyond_n == -torch.inf)


Backend = Literal["eager", "compiled", "triton"]

#: With bfloat16, and maxima that keep NaN.
_CAPABILITY = (8, 0)
#: Kernels compute in float32; float64 is for who wants more, and computed by torch.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def backend_of(
    device: torch.device, dtype: torch.dtype, *, compiled: bool, triton: bool | None
) -> Backend:
    """Choose what computes logits of this type on this device.

    Raises:
        ValueError: kernels were asked for where they cannot run, or beside `compiled`.
    """
    if compiled and triton:
        raise ValueError("token_logprobs() got compiled=True and triton=True: pass one of them")
    if compiled:
        return "compiled"
    found = uses_triton("token_logprobs()", device, asked=triton, capability=_CAPABILITY)
    return "triton" if found and dtype in DTYPES else "eager"


class Columns(NamedTuple):
    """Describes the vocabulary, and this rank's part of it."""

    first: int
    """The id of this rank's first column."""
    real: int
    """The number of this rank's columns that are tokens; columns after them are padding."""
    per_rank: int
    """The number of columns on each rank, padding included."""
    vocabulary: int
    """The number of tokens on all ranks."""
    group: Any
    """The ranks that share the vocabulary; None for one rank alone."""
    ranks: int
    """The number of ranks that share the vocabulary."""

    def real_of(self, rank: int) -> int:
        """Return the number of columns of that rank that are tokens."""
        return min(self.per_rank, max(0, self.vocabulary - rank * self.per_rank))


class ComputeOptions(NamedTuple):
    """Holds the options of a computation."""

    entropy: bool
    entropy_gradient: bool
    consume: bool
    backend: Backend
    workspace_bytes: int

    def returned(
        self, ctx: Any, whole: Whole, temperature: Tensor | float
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return `(logprob, entropy, lse)`, and mark those that have no gradient for autograd."""
        lse_N = whole.origin / temperature + whole.log_sum
        # Copies, because callers may change in place what the backward has saved.
        entropy_N = whole.entropy.clone() if self.entropy else None
        constant = [lse_N]
        if entropy_N is not None and not self.entropy_gradient:
            constant.append(entropy_N)
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return whole.logprob.clone(), entropy_N, lse_N


class TokenBatch(NamedTuple):
    """Holds the inputs of the tokens that are computed, in the order of their rows."""

    targets: Tensor
    """Ids in the vocabulary, [N]; or [N, K] of K targets, each once, -1 where there are fewer."""
    temperature: Tensor | float
    """The temperature of all tokens, or [N]."""
    columns: Columns
    wanted: ComputeOptions
    sampling: Sampling | None = None
    """The sampler, if it leaves something out."""
    keep: Tensor | None = None
    """`Sampling.keep` of these tokens, [N, K]."""

    @property
    def local(self) -> Tensor:
        """The targets' columns on this rank, in the targets' shape.

        If another rank has the target, the number is below 0 or not below that of the columns.
        """
        return self.targets - self.columns.first

    @property
    def owner(self) -> Tensor:
        """The ranks in the group that have the targets' columns, in the targets' shape."""
        return self.targets // self.columns.per_rank


def temperature_of(temperature: Tensor | float, tokens: slice | Tensor) -> Tensor | float:
    """Return the temperature of some tokens, if each token has its own."""
    return temperature[tokens] if isinstance(temperature, Tensor) else temperature


def is_unit_temperature(temperature: Tensor | float) -> bool:
    """Return whether the temperature is 1, so that logits need no division."""
    return not isinstance(temperature, Tensor) and temperature == 1


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which logits of this type are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_ours(local: Tensor, columns: int) -> Tensor:
    """Return a mask of the columns that are among the first `columns`, those of this rank."""
    return (local >= 0) & (local < columns)


def place_of(local_n: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return the targets' columns on this rank, and a mask of targets that this rank has.

    Both are [n, 1], or [n, K] for K targets. The column is 0 if another rank has the target.
    """
    local_nK = local_n if local_n.dim() == 2 else local_n[:, None]
    ours_nK = is_ours(local_nK, columns)
    return torch.where(ours_nK, local_nK, 0), ours_nK
