"""Writes out a mixture of experts as Megatron's router sends tokens to it, and its auxiliary loss.

Legend: B rows, T positions, H hidden size, E experts, N tokens, M tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from .layouts import EXPERTS

TOPK = 2
"""Experts of each token."""
COEFFICIENT = 0.25
"""`moe_aux_loss_coeff`: the loss makes up about as much of the gradient as the tokens' own."""
MARGIN = 0.1
"""The least difference between the last logit that takes a token and the first that does not.

The logits are below 3, of which the roundings of a step in float32 are 0.07 at most (2.4 %): a
token goes to the same experts in the model and here. In bfloat16 independent roundings leave all of
these margins, as tests/proof/certify/test_bounds.py finds."""


def mixture(
    parameters: Mapping[str, Tensor], at: str, x_BTH: Tensor, routed: list[Tensor]
) -> Tensor:
    """Return what a layer's experts make of x [B, T, H], and add the router's logits to `routed`.

    A token goes to the experts with its largest logits, and gets the sum of their outputs, each
    times the softmax over these logits alone.

    Raises:
        RuntimeError: a token is so near to two choices that roundings could decide.
    """
    logits_BTE = functional.linear(x_BTH, parameters[f"{at}.router.weight"])
    routed.append(logits_BTE)
    top = logits_BTE.detach().topk(TOPK + 1).values
    margin = float((top[..., -2] - top[..., -1]).min())
    if margin < MARGIN:
        raise RuntimeError(
            f"the router of {at} is undecided: two logits differ by {margin:.3g}, less than "
            f"{MARGIN:g}; give this check other rows"
        )
    values, chosen = logits_BTE.topk(TOPK)
    share = torch.zeros_like(logits_BTE).scatter(-1, chosen, values.softmax(-1)).flatten(0, 1)
    taken = torch.zeros_like(logits_BTE).scatter(-1, chosen, 1.0).flatten(0, 1)
    x_NH = x_BTH.flatten(0, 1)
    mixed = torch.zeros_like(x_NH)
    for expert in range(EXPERTS):
        own = taken[:, expert].nonzero()[:, 0]
        first, second = (
            parameters[f"{at}.experts.local_experts.{expert}.linear_fc{n}.weight"] for n in (1, 2)
        )
        made = functional.linear(functional.gelu(functional.linear(x_NH[own], first)), second)
        mixed = mixed.index_add(0, own, made * share[own, expert, None])
    return mixed.view_as(x_BTH)


def balance(logits_BTE: Tensor) -> Tensor:
    """Return a router's auxiliary loss of one microbatch, times its positions.

    Of a microbatch of M tokens it is COEFFICIENT x E x the sum over experts of f x p: f is the
    share of the M x TOPK choices that took the expert, and p the mean over tokens of the expert's
    softmax over all experts.
    """
    logits_ME = logits_BTE.flatten(0, 1)
    tokens = len(logits_ME)
    chosen = logits_ME.detach().topk(TOPK).indices
    f_E = torch.bincount(chosen.flatten(), minlength=EXPERTS).to(logits_ME) / (tokens * TOPK)
    p_E = logits_ME.softmax(-1).mean(0)
    return tokens * COEFFICIENT * EXPERTS * (f_E * p_E).sum()


def decided(name: str, value: Tensor) -> Tensor:
    """Return what to add to a whole parameter so that routers decide by wide margins.

    Each token of the vocabulary gets an order of the experts, written into the first E hidden
    values of its embedding so large that no layer changes it; routers read these values, and the
    last norm keeps them from the output layer. The first experts are preferred, because the
    auxiliary loss of balanced ones has no gradient.
    """
    added = torch.zeros(value.shape, dtype=torch.float64)
    own = torch.arange(EXPERTS)
    if name == "embedding.word_embeddings.weight":
        generator = torch.Generator().manual_seed(11)
        scores = torch.rand(len(value), EXPERTS, generator=generator, dtype=torch.float64)
        order = (scores - 0.15 * own).argsort(descending=True)
        levels = torch.tensor([0.45, 0.3, -0.3, -0.45], dtype=torch.float64).expand(order.shape)
        added[:, :EXPERTS] = torch.zeros_like(levels).scatter(1, order, levels)
    elif name.endswith(".router.weight"):
        added[own, own] = 0.3
    elif name.endswith("final_layernorm.weight"):
        added[own] = -0.9
    elif name.endswith(".eh_proj.weight"):  # the part that reads the next token's embedding
        added[own, own] = 0.5
    return added
