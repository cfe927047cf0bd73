"""The columns that a sampler kept, few of many, and their gradient.

Legend: N tokens, E kept columns of this rank, K ids for a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .asked import Asked, accumulated, is_ours
from .combine import Partial, Whole, combine
from .fused import FINITE
from .sampling import columnwise
from .slopes import Slopes
from .sources import Source


class Kept(NamedTuple):
    """Columns of this rank that take part, each once; [E]."""

    row: Tensor
    """The token of each element."""
    column: Tensor
    """Here, not in the vocabulary."""
    logit: Tensor

    @staticmethod
    def joined(parts: list[Kept], like_N: Tensor) -> Kept:
        """All of them; indices take half of what they did."""
        none = like_N.new_empty(0)
        parts = [Kept(none.int(), none.int(), none), *parts]
        row, column, logit = map(torch.cat, zip(*parts, strict=True))
        return Kept(row.int(), column.int(), logit.to(like_N.dtype))

    def gradient(self, slopes: Slopes, temperature: Tensor | float) -> Tensor:
        """Returns the gradient of these columns' logits, [E]."""
        row_E = self.row.long()
        t_E = temperature[row_E] if isinstance(temperature, Tensor) else temperature
        z_E = self.logit if slopes.origin is None else self.logit - slopes.origin[row_E]
        z_E = z_E / t_E
        factor_E = slopes.factor[row_E]
        if slopes.slope is not None:
            factor_E = factor_E + slopes.slope[row_E] * z_E.clamp(min=FINITE)
        target_E = self.column == slopes.local[row_E]
        return torch.where(target_E, slopes.of_target[row_E], z_E.exp() * factor_E)


def named(source: Source, asked: Asked) -> tuple[Kept, Whole]:
    """The ids of `keep`, and statistics over them.

    A collective of the group's ranks, one all-gather of 16 bytes per token and rank.
    """
    assert asked.keep is not None
    assert asked.sampling is not None
    columns, local_N = asked.columns, asked.local
    target_N1 = asked.targets[:, None]
    keep_NK = asked.keep.sort(-1).values
    again_NK = torch.zeros_like(keep_NK, dtype=torch.bool)
    again_NK[:, 1:] = keep_NK[:, 1:] == keep_NK[:, :-1]
    kept_N = (keep_NK == target_N1).any(-1) | (asked.sampling.target == "keep")
    # The target has the last place, whether or not it is kept, and no other.
    local_NK = torch.cat([keep_NK - columns.first, local_N[:, None]], 1)
    left_NK = torch.cat([(keep_NK >= 0) & ~again_NK & (keep_NK != target_N1), kept_N[:, None]], 1)
    left_NK &= is_ours(local_NK, columns.real)
    place_NK = torch.where(left_NK, local_NK, 0)
    if columns.real:
        logits_NK = source.at(place_NK).to(accumulated(source.dtype))
    else:
        logits_NK = place_NK.to(accumulated(source.dtype))
    ours_N = is_ours(local_N, columns.real)
    logits_NK = torch.where(left_NK, logits_NK, -torch.inf)
    maximum_N = logits_NK.amax(-1).clamp(min=FINITE)
    z_NK = (logits_NK - maximum_N[:, None]) / columnwise(asked.temperature)
    mass_NK = z_NK[:, :-1].exp()  # the target is no part of the sums
    partial = Partial(
        origin=maximum_N,
        exponentials=mass_NK.sum(-1),
        moments=(mass_NK * z_NK[:, :-1].clamp(min=FINITE)).sum(-1),
        target=torch.where(ours_N, z_NK[:, -1], 0.0),
    )
    whole = combine(partial, asked.owner, asked.temperature, columns.group)
    whole = whole._replace(logprob=torch.where(kept_N, whole.logprob, -torch.inf))
    row_E, slot_E = left_NK.nonzero().unbind(1)
    found = Kept(row_E, place_NK[row_E, slot_E], logits_NK[row_E, slot_E])
    return Kept.joined([found], maximum_N), whole
