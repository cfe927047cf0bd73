"""Random calls with K targets for each token, and what float64 says of them. Runs on a rank."""

from __future__ import annotations

import random
from typing import Any

import torch
from cases import SHAPES, WIDTHS, Case, Exact, Truth, U, additions, padded

from megatron_idempotent import token_logprobs


def case(seed: int, size: int, widths: tuple[int, ...] = WIDTHS) -> Case:
    """The same on all ranks; some ids are ignored, and some named twice."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape, local = draw.choice(SHAPES), draw.choice(widths)
    count = draw.choice([1, 2, 9])
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64])
    whole = torch.randn(*shape, local * size, dtype=torch.float64) * draw.choice([0.1, 1, 4, 50])
    whole += draw.choice([0.0, 0.0, 90.0, -300.0, 1e4])
    vocabulary = local * size - draw.choice([0, 0, min(local, local * size - 1)])
    targets = torch.randint(0, vocabulary, (*shape, count))
    if draw.random() < 0.3:
        whole[torch.rand_like(whole) < 0.3] = -torch.inf
    # Something is finite of the targets, so that their log-probs are; here and there one is far
    # above all others, of which the rest is next to nothing.
    finite = whole.masked_fill(whole == -torch.inf, 0.0).gather(-1, targets)
    finite += torch.where(torch.rand_like(finite) < 0.1, 120.0, 0.0)
    whole.scatter_(-1, targets, finite)
    if draw.random() < 0.5:
        targets = targets.masked_fill(torch.rand(targets.shape) < 0.3, -100)
    if draw.random() < 0.3:
        targets = targets.int()
    arguments: dict[str, Any] = {
        "targets": targets,
        "vocab_size": vocabulary,
        "temperature": draw.choice([1.0, 0.7, torch.rand(shape) + 0.5]),
        "entropy": draw.choice(["none", "metric", "grad"]),
        "workspace_bytes": draw.choice([1, 1000, None]),
        "ownership": draw.choice(["borrow", "consume"]),
    }
    if draw.random() < 0.5:
        arguments["token_mask"] = torch.rand(shape) < draw.choice([0.0, 0.5, 1.0])
    return Case(
        whole=whole.to(dtype),
        arguments=arguments,
        layout=draw.choice(["plain", "transposed", "sliced", "gaps"]),
        of_logprob=torch.randn(*shape, count + 1),  # the last one is the rest's
        of_entropy=torch.randn(shape),
    )


def outputs(given: Case, **form: Any) -> dict[str, Any]:
    """Make the call with logits, or with hidden states and weight."""
    found = token_logprobs(**form, **given.arguments)._asdict()
    assert (found["entropy"] is None) == (given.arguments["entropy"] == "none")
    return found


def total(stats: dict[str, Any], given: Case) -> Any:
    """The sum that is differentiated; a rest of nothing has no gradient, and takes no part."""
    rest = torch.where(stats["rest"] > -torch.inf, stats["rest"], 0.0)
    found = (stats["logprob"] * given.of_logprob[..., :-1]).sum()
    found = found + (rest * given.of_logprob[..., -1]).sum()
    if given.arguments["entropy"] == "grad":
        found = found + (stats["entropy"] * given.of_entropy).sum()
    return found


def truth(given: Case) -> Truth:
    """Values in float64, and bounds to first order in the unit roundoff u.

    As in `cases.truth`, with z = (logit - top) / temperature and `top` above all columns. Each z
    carries two roundings, and one of the temperature where parts are put together; exp and the sum
    of all others as many as a term meets additions, and 8. Targets are added in float64. What is
    returned carries one more.
    """
    arguments, double = given.arguments, torch.float64
    u, scale, logits, logp, z, log_sum = Exact.of(given)
    targets, size = arguments["targets"].long(), logits.shape[-1]
    valid = targets != -100
    kept = valid.any(-1) & arguments.get("token_mask", valid.any(-1))
    valid = valid & kept[..., None]
    named = torch.zeros(*logits.shape[:-1], size + 1, dtype=torch.bool)
    named = named.scatter(-1, torch.where(valid, targets, size), True)[..., :size]
    others = logp.masked_fill(named | (logp == -torch.inf), -1e30)
    # Of nothing, -inf; its gradient would be NaN.
    rest = torch.where((others > -1e30).any(-1), others.logsumexp(-1), -torch.inf)
    p = logp.exp()
    values = {
        "logprob": torch.where(valid, logp.gather(-1, targets.clamp(min=0)), 0.0),
        "rest": torch.where(kept, rest, 0.0),
        "entropy": torch.where(kept, -(p * logp.clamp(min=-1e30)).sum(-1), 0.0),
        "lse": torch.where(kept, (logits / scale).logsumexp(-1), 0.0),
    }
    (gradient,) = torch.autograd.grad(total(values, given), logits)
    gradient = torch.where(kept[..., None], gradient, 0.0)
    with torch.no_grad():
        sums, finite = additions(size) + 8, logp.clamp(min=-1e30)
        others = torch.where(named, 0.0, p)
        mass = others.sum(-1).clamp(min=1e-300)
        of_others = u * (3 * (others / mass[..., None] * z).sum(-1) + sums)
        first, second = (p * z).sum(-1), (p * z * z).sum(-1)
        of_log_sum = mass * of_others + u * (3 * first + 2 + log_sum)
        of_rest = of_others + of_log_sum + u * rest.abs().clamp(max=1e15)
        target_z = z.gather(-1, targets.clamp(min=0))
        of_logprob = u * (3 * target_z + values["logprob"].abs()) + of_log_sum[..., None]
        of_entropy = of_log_sum + u * (3 * second + (sums + 4) * first + values["entropy"])
        of_lse = of_log_sum + 2 * u * values["lse"].abs()
        # Of p, or of q = p / rest, which is computed of all but the targets.
        relative = u * (3 * z + finite.abs().clamp(max=1e15) + 2 * log_sum[..., None] + 8)
        relative += (2 * of_log_sum + of_rest)[..., None]
        q = others / mass[..., None]
        all_of = (given.of_logprob.abs() * torch.cat([valid, kept[..., None]], -1)).sum(-1)
        of_the_rest = given.of_logprob[..., -1].abs() * (rest > -torch.inf)
        bulk = of_the_rest * (1 - mass) + mass * all_of
        of_gradient = q * (
            bulk[..., None] * (relative + 4 * u) + (all_of * mass * of_rest)[..., None]
        )
        of_targets = (p * (relative + 4 * u) + 4 * u) * all_of[..., None]
        of_gradient = torch.where(named, of_targets, of_gradient)
        computed = torch.finfo(double if u == U[double] else torch.float32)
        of_gradient += all_of[..., None] * computed.smallest_normal
        if arguments["entropy"] == "grad":
            inner = (values["entropy"][..., None] + finite.abs()).clamp(max=1e3)
            # log p = log q + rest: what cancels has been rounded.
            error = (
                of_entropy[..., None]
                + relative
                + u * (3 * z + rest.abs().clamp(max=1e3)[..., None])
            )
            of_gradient += given.of_entropy.abs()[..., None] * (
                p * (inner * (relative + 4 * u) + error) + inner * computed.smallest_normal
            )
        out = torch.finfo(given.whole.dtype)
        of_gradient = of_gradient / scale + (2 * u + out.eps / 2) * gradient.abs()
        of_gradient += out.smallest_normal * out.eps
        bounds = {
            "logprob": of_logprob * valid,
            "rest": torch.where(kept, of_rest, 0.0),
            "entropy": torch.where(kept, of_entropy, 0.0),
            "lse": torch.where(kept, of_lse, 0.0),
            "gradient": of_gradient * kept[..., None],
        }
    values = {name: value.detach() for name, value in values.items()}
    return padded({**values, "gradient": gradient}, bounds, given)
