"""The coefficients of the gradient of a token's logits: a few numbers per token.

Legend: N tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .asked import divides_nothing
from .combine import Whole
from .fused import FINITE

#: Of log Σ exp(logits). Below, exponentials lose bits of probabilities that have all of theirs;
#: beyond, what they are multiplied with does.
_LEAST, _MOST = -15.0, 40.0
#: Of all tokens: for less, picking them costs more than it saves.
_FEW = 0.9


class Slopes(NamedTuple):
    """The gradient of each kept token [N]: exp(z)·(factor + slope·z), `of_target` at its target.

    z = (logit - origin) / temperature.
    """

    local: Tensor
    origin: Tensor | None
    """None where it is 0 for all."""
    factor: Tensor
    slope: Tensor | None
    of_target: Tensor

    @staticmethod
    def made(
        local_N: Tensor,
        whole: Whole,
        of_logprob_N: Tensor | None,
        of_entropy_N: Tensor | None,
        temperature: Tensor | float,
    ) -> Slopes:
        """Out of p·(-g_logprob - g_entropy·(H + log p)) + [column = target]·g_logprob.

        With H + log p = z - mean nothing cancels; the target's 1 - p is that of its log-prob.
        """
        origin_N, sum_N, mean_N, _, logprob_N, entropy_N = (each.double() for each in whole)
        like_N = whole.origin
        if of_logprob_N is None:
            of_logprob_N = torch.zeros_like(like_N)
        of_logprob_N = of_logprob_N / temperature
        factor_N, slope_N = -of_logprob_N / sum_N, None
        of_target_N = -of_logprob_N * logprob_N.expm1()
        if of_entropy_N is not None:
            of_entropy_N = of_entropy_N / temperature
            factor_N = factor_N + of_entropy_N * mean_N / sum_N
            slope_N = (-of_entropy_N / sum_N).to(like_N)
            inner_N = (logprob_N + entropy_N).clamp(min=FINITE)
            of_target_N = of_target_N - of_entropy_N * logprob_N.exp() * inner_N
        elif divides_nothing(temperature):
            # exp(logit), or if that or its factor might not be a normal number, exp(logit - lse).
            lse_N = origin_N + sum_N.log()
            near_N = (lse_N > _LEAST) & (lse_N < _MOST)
            origin_N = torch.where(near_N, 0.0, lse_N.to(like_N)).double()
            factor_N = -of_logprob_N * (origin_N - lse_N).exp()
        origin = origin_N.to(like_N) if bool(origin_N.any()) else None
        return Slopes(local_N, origin, factor_N.to(like_N), slope_N, of_target_N.to(like_N))

    def of(self, tokens: slice | Tensor) -> Slopes:
        chosen: list[Any] = [None if each is None else each[tokens] for each in self]
        return Slopes(*chosen)


def differentiated(of_logprob_N: Tensor | None, of_entropy_N: Tensor | None) -> Tensor:
    """Returns a mask of the tokens whose outputs have a gradient that is not 0.

    Clipped tokens have none, and those of groups whose rewards are all alike.
    """
    parts = [each != 0 for each in (of_logprob_N, of_entropy_N) if each is not None]
    return parts[0] if len(parts) == 1 else parts[0] | parts[1]


def picked(live_N: Tensor) -> Tensor | None:
    """The same, or None if that is nearly all tokens. Read on the host."""
    few = int(live_N.sum()) <= _FEW * len(live_N)
    return live_N if few and len(live_N) else None
