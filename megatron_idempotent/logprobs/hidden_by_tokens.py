"""Log-probs from hidden states where Triton's kernels run: all columns of some tokens at a time.

The kernels want whole rows, and a product wants many rows of hidden states for each reading of the
weight. The block of logits is made by one product, read in place, and in the backward overwritten
with its gradient, of which two more products are made: rows of the hidden states' gradient, each
rounded once, and a summand of the weight's, added up in float32 by the product itself.

What is held, for 262,144 tokens of 2,048 features in bfloat16 and 62,080 columns, in GB: hidden
states 1.07 and their gradient 1.07, weight 0.25 and its gradient 0.25, its sum in float32 0.51
(none with a `main_grad` of float32), a block of logits 0.53, the tokens' numbers 0.03: 3.7.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .asked import Asked, temperature_of
from .combine import Partial, Whole
from .kernels import partial_of
from .parts import Parts, Product
from .weight_gradient import SummedWeightGradient, product_into


def partial_by_tokens(hidden_NH: Tensor, weight_VH: Tensor, asked: Asked, parts: Parts) -> Partial:
    """Statistics of this rank's columns. One product for each block of tokens."""
    columns, product = asked.columns, Product()
    weight_HV = weight_VH[: columns.real].t()
    found = []
    for tokens in parts.of_tokens(len(hidden_NH), columns.real, hidden_NH.dtype):
        logits_nV = product(hidden_NH[tokens], weight_HV)
        temperature = temperature_of(asked.temperature, tokens)
        arguments = (asked.local[tokens], None, temperature, columns, asked.wanted)
        found.append(partial_of(logits_nV, *arguments))
    return found[0] if len(found) == 1 else Partial(*map(torch.cat, zip(*found, strict=True)))


def gradients_by_tokens(
    weight: Tensor,
    hidden_NH: Tensor,
    weight_VH: Tensor,
    asked: Asked,
    parts: Parts,
    *,
    given: tuple[Whole, Tensor | None, Tensor | None],
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of hidden states, this rank's share, and of the weight.

    `weight` has the `main_grad`; it may be another object than what autograd has saved. `given` are
    the statistics, and the gradients of log-probs and entropies. The hidden states' is of float32
    where shares of several ranks are added up.
    """
    from . import on_gpu

    of_hidden, of_weight = needed
    columns, dtype = asked.columns, hidden_NH.dtype
    slopes, token_N = on_gpu.slopes_of(asked, *given)
    token_L = (token_N >= 0).nonzero().squeeze(1)
    every = len(token_L) == len(hidden_NH)
    real_VH = weight_VH[: columns.real]
    blocks = list(parts.of_tokens(len(token_L), columns.real, dtype)) if len(token_L) else []
    d_hidden_NH: Any = None
    if of_hidden:
        made = torch.empty_like if every and columns.real else torch.zeros_like
        summed = slopes.factor.dtype if parts.reduce else dtype
        d_hidden_NH = made(hidden_NH, dtype=summed)
    d_weight = SummedWeightGradient(weight, of_weight, parts.fused, columns.real, len(blocks))
    product = Product()
    for block in blocks if columns.real else ():
        chosen: Any = block if every else token_L[block]
        hidden_nH, some = hidden_NH[chosen], slopes.of(chosen)
        logits_nV = product(hidden_nH, real_VH.t())
        temperature, rows = temperature_of(asked.temperature, chosen), [logits_nV]
        on_gpu.write_gradient(rows, rows, None, None, some, temperature, columns)
        if isinstance(chosen, slice) and d_hidden_NH is not None:
            product_into(d_hidden_NH[chosen], logits_nV, real_VH)
        elif d_hidden_NH is not None:
            d_hidden_nH = d_hidden_NH.new_empty(hidden_nH.shape)
            d_hidden_NH[chosen] = product_into(d_hidden_nH, logits_nV, real_VH)
        d_weight.add(logits_nV, hidden_nH)
    return d_hidden_NH, d_weight.done()
