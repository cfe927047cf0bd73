"""Bounds the errors of a correct step by the sum of its roundings, in each precision."""

from __future__ import annotations

import math

from megatron_idempotent.proof.cpu import tiny

from .layouts import EXPERTS, LAYERS, Layout
from .oracle import Truth

_FLOAT32 = 2.0**-24
#: Megatron computes the softmax over the vocabulary in float32, whatever the model's type: each
#: token's gradient has as many roundings as there are words, and a few more. Tokens' gradients are
#: independent: their sum is smaller than the sum of their norms by the root of their number.
_SOFTMAX = (tiny.VOCABULARY + 32) * _FLOAT32
#: Megatron computes a router's softmaxes in float32, too, over all experts and over those chosen:
#: their roundings are in each token's output and gradient. Differences of like terms add a few.
_ROUTER = (EXPERTS + 32) * _FLOAT32
#: The roundings of a whole step in float32, layer by layer: tests/step/roundings.py derives them.
_ROUNDINGS = 4e5 * _FLOAT32
#: The roundings of a gradient in bfloat16: twice the effect of three independent roundings of each
#: operation's result, which tests/proof/certify/test_oracle.py measures. They depend on the kind of
#: loss, and on whether layers have auxiliary losses. In float16 roundings are an eighth of them.
OF_BFLOAT16 = {
    ("token", False): 0.06,
    ("sequence", False): 0.07,
    ("token", True): 0.08,
    ("sequence", True): 0.095,
}
_HALF_LOGPROBS = 0.014
_FINER = {"bf16": 1.0, "fp16": 8.0}


def of_logprobs(layout: Layout) -> float:
    """Return the largest allowed error of an adapter's log-probabilities in this layout: the norm
    of their difference from the right ones, divided by the norm of the right ones.
    """
    if layout.dtype in _FINER:
        return _HALF_LOGPROBS / _FINER[layout.dtype]
    if layout.dtype == "fp32":
        return _ROUNDINGS
    routers = LAYERS + ("mtp" in layout.flags) if layout.experts else 0
    return _SOFTMAX + routers * _ROUTER


def of_gradient(layout: Layout, truth: Truth) -> float:
    """Return the largest allowed error of a step's gradient in this layout: the norm of its
    difference from the right gradient (`truth`), divided by the norm of the right gradient.
    """
    if layout.dtype in _FINER:
        bound = OF_BFLOAT16[layout.loss_kind, layout.auxiliary]
        return bound / _FINER[layout.dtype]
    independent = math.sqrt(max(truth.terms, 1.0)) if layout.dtype == "fp64" else 1.0
    return of_logprobs(layout) * independent
