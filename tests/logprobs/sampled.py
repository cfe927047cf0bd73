"""Random calls over what a sampler left, and what float64 says of them. Runs on a rank.

Logits are whole numbers of 1/8, exact in every type, so that all find the same boundaries.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from cases import SHAPES, Case, Truth, outputs, padded
from cases import total as total_of_one

from megatron_idempotent.logprobs import Sampling

__all__ = ["case", "outputs", "total", "truth"]


def case(seed: int, size: int, widths: tuple[int, ...] = (2, 5, 40)) -> Case:
    """The same on all ranks."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape, local = draw.choice(SHAPES), draw.choice(widths)
    real = max(1, local * size - draw.choice([0, 1, local]))
    more: dict[str, Any] = {"target": draw.choice(["keep", "-inf"])}
    kind = draw.choice(["k", "p", "both", "keep"])
    if kind in ("k", "both"):
        more["top_k"] = draw.choice([1, 3, real, real + 9])
    if kind in ("p", "both"):
        more["top_p"] = draw.choice([1e-6, 0.5, 0.9, 0.999])
    if kind == "keep":
        more["keep"] = torch.randint(-2, real, (*shape, draw.choice([1, 4, 9])))
        more["keep"][..., 0].clamp_(min=0)
    else:
        more["candidates"] = draw.choice([None, 1, 2, 7])
    arguments = {
        "targets": torch.randint(0, real, shape),
        "vocab_size": real,
        "temperature": draw.choice([1.0, 0.7, torch.rand(shape) + 0.5]),
        "entropy": draw.choice(["none", "metric", "grad"]),
        "token_mask": torch.rand(shape) < draw.choice([0.0, 0.7, 1.0]),
        "sampling": Sampling(**more),
        "workspace_bytes": draw.choice([1, 1000, None]),
        "ownership": draw.choice(["borrow", "consume"]),
    }
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float64])
    return Case(
        whole=(torch.randint(-64, 65, (*shape, local * size)) / 8).to(dtype),
        arguments=arguments,
        layout=draw.choice(["plain", "transposed", "sliced"]),
        of_logprob=torch.randn(shape),
        of_entropy=torch.randn(shape),
    )


def total(found: dict[str, Any], given: Case) -> Any:
    """The sum that is differentiated; a log-prob of -inf takes no part."""
    logprob = found["logprob"]
    logprob = torch.where(logprob > -torch.inf, logprob, 0.0)
    return total_of_one({**found, "logprob": logprob}, given)


def _kept(logits: Any, temperature: Any, sampling: Any) -> Any:
    """Return which columns are kept, one token at a time, as the words of `Sampling` say it."""
    kept = torch.zeros_like(logits, dtype=torch.bool)
    for row, of_row in enumerate(logits):
        if sampling.keep is not None:
            ids = sampling.keep[row]
            kept[row, ids[ids >= 0]] = True
            continue
        lowest = -torch.inf
        if sampling.top_k > 0:
            lowest = float(of_row.sort(descending=True).values[: sampling.top_k][-1])
        left = of_row >= lowest
        if sampling.top_p < 1:
            z = (of_row - of_row.max()) / temperature[row]
            p = torch.where(left, z.exp(), 0.0)
            p = p / p.sum()
            summed = 0.0
            for place in of_row.argsort(descending=True).tolist():
                lowest = float(of_row[place])
                summed += float(p[place])
                if summed >= sampling.top_p:
                    break
            left &= of_row >= lowest
        kept[row] = left
    return kept


def truth(given: Case) -> Truth:
    """Sums of fewer than 1,200 terms of numbers below 64, and the rounding of a result's type."""
    arguments, dtype = given.arguments, given.whole.dtype
    shape, size, mask = arguments["targets"].shape, arguments["vocab_size"], arguments["token_mask"]
    sampling = arguments["sampling"]
    logits = given.whole.double()[..., :size].requires_grad_()
    temperature = torch.as_tensor(arguments["temperature"], dtype=torch.float64).expand(shape)
    if sampling.keep is not None:
        keep = sampling.keep.reshape(-1, sampling.keep.shape[-1])
        sampling = dataclasses.replace(sampling, keep=keep)
    flat = logits.detach().reshape(-1, size)
    kept = _kept(flat, temperature.reshape(-1), sampling).view(logits.shape)
    target = arguments["targets"][..., None]
    inside = kept.gather(-1, target).squeeze(-1)
    if sampling.target == "keep":
        kept = kept.scatter(-1, target, torch.ones_like(target, dtype=torch.bool))
        inside = torch.ones_like(inside)
    scaled = (logits / temperature[..., None]).masked_fill(~kept, -1e30)  # whose p is 0
    logp = torch.log_softmax(scaled, -1)
    entropy = -torch.where(kept, logp.exp() * logp, 0.0).sum(-1)
    logprob = torch.where(inside, logp.gather(-1, target).squeeze(-1), -torch.inf)
    values = {"logprob": logprob, "entropy": entropy, "lse": scaled.logsumexp(-1)}
    values = {name: torch.where(mask, each, 0.0) for name, each in values.items()}
    (gradient,) = torch.autograd.grad(total(values, given), logits)
    values = {name: each.detach() for name, each in values.items()}
    computed = 2.0**-52 if dtype == torch.float64 else 2.0**-23
    rounded, terms = torch.finfo(dtype).eps, 200 if size < 200 else 1200
    bounds = {
        name: terms * computed * (2 + each.abs().clamp(max=1e9)) for name, each in values.items()
    }
    of_gradient = (terms * computed + rounded) * gradient.abs() + 0.01 * (
        2 * terms * computed + rounded
    )
    return padded({**values, "gradient": gradient}, {**bounds, "gradient": of_gradient}, given)
