"""Random calls of `token_logprobs`, and what float64 says of them. Runs on a rank.

A kind of calls is a module with functions `case`, `outputs`, `total` and `truth`: this one, of one
target, `several_targets` and `sampled`. `within_bounds` holds a call of any kind to its bounds.
"""

from __future__ import annotations

import dataclasses
import importlib
import random
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_idempotent import token_logprobs

SHAPES = [(), (0,), (1,), (7,), (2, 5), (0, 3), (3, 2, 2)]
#: Columns of a rank.
WIDTHS = (1, 3, 17, 64)
#: The largest part of its bound that an error has had on this rank, by what was compared.
USED: dict[str, float] = {}
#: What a rounding may be off by, relative to the result; float64 is compared with itself, and both
#: sides are rounded.
U = {
    torch.float32: torch.finfo(torch.float32).eps / 2,
    torch.float64: torch.finfo(torch.float64).eps,
}


@dataclasses.dataclass
class Case:
    """One call on logits that all ranks know whole."""

    whole: Any
    """[..., V · ranks], the values that the ranks' shards are cut from."""
    arguments: dict[str, Any]
    """Without logits and group."""
    layout: str
    of_logprob: Any
    of_entropy: Any = None

    def shard(self, rank: int, size: int, device: str = "cpu") -> tuple[Any, Any]:
        """A rank's leaf, and logits made of it that lie in memory as the case says."""
        leaf = self.whole.chunk(size, -1)[rank].contiguous().to(device).requires_grad_()
        if self.layout == "transposed" and leaf.dim() > 2:
            return leaf, leaf.transpose(0, 1).contiguous().transpose(0, 1)
        if self.layout == "sliced" and leaf.dim() > 1 and leaf.numel():
            return leaf, torch.cat([leaf, leaf[..., :1, :]], -2)[..., :-1, :]
        if self.layout == "gaps":
            return leaf, torch.cat([leaf, leaf], -1)[..., : leaf.shape[-1]]
        return leaf, leaf * 1


def case(seed: int, size: int, widths: tuple[int, ...] = WIDTHS) -> Case:
    """The same on all ranks."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape, local = draw.choice(SHAPES), draw.choice(widths)
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64])
    whole = torch.randn(*shape, local * size, dtype=torch.float64) * draw.choice([0.1, 1, 4, 50])
    vocabulary = local * size - draw.choice([0, 0, min(local, local * size - 1)])
    targets = torch.randint(0, vocabulary, shape)
    kind = draw.choice(["none", "columns", "shard"])
    if kind == "columns":
        whole[torch.rand_like(whole) < 0.3] = -torch.inf
    elif kind == "shard":
        whole.chunk(size, -1)[draw.randrange(size)][:] = -torch.inf
    # Of the targets something is finite, so that their log-probs are.
    whole.scatter_(-1, targets[..., None], torch.randn(*shape, 1, dtype=torch.float64))
    arguments: dict[str, Any] = {
        "targets": targets,
        "vocab_size": draw.choice([vocabulary, vocabulary, None])
        if vocabulary == local * size
        else vocabulary,
        "temperature": draw.choice([1.0, 0.7, torch.rand(shape) + 0.5]),
        "entropy": draw.choice(["none", "metric", "grad"]),
        "workspace_bytes": draw.choice([1, 1000, None]),
        "ownership": draw.choice(["borrow", "consume"]),
    }
    if draw.random() < 0.5:
        arguments["token_mask"] = torch.rand(shape) < draw.choice([0.0, 0.5, 1.0])
    if draw.random() < 0.3:
        ignored = torch.rand(shape) < 0.3
        arguments["targets"] = targets.masked_fill(ignored, -100)
    layout = draw.choice(["plain", "transposed", "sliced", "gaps"])
    if draw.random() < 0.3:
        arguments["targets"] = arguments["targets"].int()
    of_logprob, of_entropy = torch.randn(2, *shape)
    return Case(whole.to(dtype), arguments, layout, of_logprob, of_entropy)


def summed(stats: Any) -> Any:
    """The sum of log-probs, and of entropies if they are differentiated."""
    entropy = stats.entropy
    has_gradient = entropy is not None and entropy.requires_grad
    return stats.logprob.sum() + (entropy.sum() if has_gradient else 0)


def additions(terms: int) -> int:
    """Bounds the additions that a term meets where torch sums up a row, on any CPU.

    torch sums in cascades: four levels of 16 additions, each in vectors of up to 16 lanes and in
    four of them side by side, which are added up at the end, and a rest of fewer than 16.
    """
    return min(terms, 4 * 16 + 3 + 3 + 16 + 16)


Truth = tuple[dict[str, Any], dict[str, Any]]
"""Values in float64 by name, "gradient" among them, and how far off the computing type may be."""


def outputs(given: Case, **form: Any) -> dict[str, Any]:
    """Make the call with logits, or with hidden states and weight."""
    stats = token_logprobs(**form, **given.arguments)
    entropy = given.arguments["entropy"]
    assert (stats.entropy is None) == (entropy == "none")
    assert stats.rest is None
    assert not stats.lse.requires_grad
    assert stats.entropy is None or stats.entropy.requires_grad == (entropy == "grad")
    return stats._asdict()


def total(found: dict[str, Any], given: Case) -> Any:
    """The sum that is differentiated."""
    of_logprob, of_entropy = (
        None if each is None else each.to(found["logprob"].device)
        for each in (given.of_logprob, given.of_entropy)
    )
    summed = (found["logprob"] * of_logprob).sum()
    if given.arguments["entropy"] == "grad":
        summed = summed + (found["entropy"] * of_entropy).sum()
    return summed


def reference(logits: Any, targets: Any, temperature: Any = 1.0) -> tuple[Any, Any]:
    """Log-probs of one target for each token, and entropies, in float64."""
    scale = torch.as_tensor(temperature, dtype=torch.float64, device=logits.device)[..., None]
    logp = torch.log_softmax(logits.double() / scale, -1)
    logprob = logp.gather(-1, targets.long().clamp(min=0)[..., None]).squeeze(-1)
    return logprob, -(logp.exp() * logp.clamp(min=-1e30)).sum(-1)


class Exact(NamedTuple):
    """A call's logits in float64, and what bounds are made of."""

    u: float
    """The unit roundoff of the computing type."""
    scale: Any
    """The temperature as the computing type has it, [..., 1]."""
    logits: Any
    """A leaf, without the columns that pad the vocabulary."""
    logp: Any
    z: Any
    """Distances from the largest logit, divided by the temperature; what their roundings go by."""
    log_sum: Any
    """The logarithm of the sum of exponentials of the distances; 0 or more."""

    @staticmethod
    def of(given: Case) -> Exact:
        u = U.get(given.whole.dtype, U[torch.float32])
        temperature = torch.as_tensor(given.arguments["temperature"], dtype=torch.float64)
        if u != U[torch.float64]:  # a number or tensor of float32 divides
            temperature = temperature.float().double()
        scale = temperature[..., None]
        size = given.arguments["vocab_size"] or given.whole.shape[-1]
        logits = given.whole.double()[..., :size].requires_grad_()
        with torch.no_grad():
            z = ((logits - logits.amax(-1, keepdim=True)) / scale).clamp(min=-1e15)
            log_sum = z.exp().sum(-1).log()
            z = z.abs()
            if u == U[torch.float64]:  # torch divides before it subtracts
                z += (logits / scale).abs().clamp(max=1e15)
        return Exact(u, scale, logits, torch.log_softmax(logits / scale, -1), z, log_sum)


def truth(given: Case) -> Truth:
    """Errors are bounds to first order in the unit roundoff u.

    z = (logit - max) / temperature carries two roundings, exp and the sums of V terms as many of
    the result as a term meets additions, and 8; what is returned carries one more. E is the mean
    under p.
    """
    arguments, dtype = given.arguments, torch.float64
    u, scale, logits, logp, z, log_sum = Exact.of(given)
    targets, temperature = arguments["targets"].long(), scale.squeeze(-1)
    kept = targets != arguments.get("ignore_index", -100)
    kept = kept & arguments.get("token_mask", kept)
    p = logp.exp()
    finite = logp.clamp(min=-1e30)
    logprob, entropy = reference(logits, targets, temperature)
    (gradient,) = torch.autograd.grad(
        total({"logprob": logprob * kept, "entropy": entropy * kept}, given), logits
    )
    with torch.no_grad():
        computed = torch.finfo(dtype if u == U[dtype] else torch.float32)
        sums = additions(logits.shape[-1]) + 8
        target_z = z.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
        first, second = (p * z).sum(-1), (p * z * z).sum(-1)
        of_log_sum = u * (2 * first + sums + log_sum)
        of_logprob = u * (3 * target_z + logprob.abs()) + of_log_sum
        of_entropy = of_log_sum + u * (3 * second + (sums + 4) * first + entropy)
        lse = logits.amax(-1) / temperature + log_sum
        weights = given.of_logprob.abs()[..., None]
        relative = u * (3 * z + finite.abs() + log_sum[..., None] + 8) + of_log_sum[..., None]
        # Below the normal numbers nothing is said of p.
        of_gradient = weights * (p * relative + computed.smallest_normal)
        if arguments["entropy"] == "grad":
            inner = entropy[..., None] + finite.abs()
            weights = given.of_entropy.abs()[..., None]
            error = of_entropy[..., None] + u * (3 * z + 4) + of_log_sum[..., None]
            inner = inner.clamp(max=1e3)  # where p is not 0
            of_gradient += weights * p * (inner * (relative + 4 * u) + error)
            of_gradient += weights * inner * computed.smallest_normal
        out = torch.finfo(given.whole.dtype)
        of_gradient = of_gradient / scale + (2 * u + out.eps / 2) * gradient.abs()
        of_gradient += out.smallest_normal * out.eps  # half of it, where numbers are subnormal
        values = {"logprob": logprob, "entropy": entropy, "lse": lse}
        bounds = {
            "logprob": of_logprob,
            "entropy": of_entropy,
            "lse": of_log_sum + 2 * u * lse.abs(),
            "gradient": of_gradient * kept[..., None],
        }
    values = {name: torch.where(kept, each.detach(), 0.0) for name, each in values.items()}
    bounds |= {name: torch.where(kept, bounds[name], 0.0) for name in values}
    return padded({**values, "gradient": gradient}, bounds, given)


def padded(values: dict[str, Any], bounds: dict[str, Any], given: Case) -> Truth:
    """Let gradients and their bounds have the columns that pad the vocabulary, too."""
    more = given.whole.shape[-1] - values["gradient"].shape[-1]
    for each in (values, bounds):
        each["gradient"] = torch.nn.functional.pad(each["gradient"], (0, more))
    return values, bounds


def close(what: str, value: Any, expected: Any, bound: Any, name: object) -> None:
    """Hold values to their bounds; what is infinite is so on both sides."""
    value = value.detach().cpu().double()
    error = torch.where(value == expected, 0.0, (value - expected).abs())
    beyond = (error / bound)[~(error <= bound)].tolist()  # NaN too
    assert not beyond, f"{what} of {name}: {len(beyond)} beyond, {beyond[:9]}"
    if error.numel():
        share = float((error / bound).nan_to_num(0.0).max())
        USED[what] = max(USED.get(what, 0.0), share)


def within_bounds(
    given: Case, name: object, device: str = "cpu", kind: str = "cases"
) -> list[bytes]:
    """A call on a rank that shares the vocabulary with all others, held to its bounds.

    What it found, as bytes.
    """
    of_kind = importlib.import_module(kind)
    rank, size = dist.get_rank(), dist.get_world_size()
    leaf, logits = given.shard(rank, size, device)
    there = dataclasses.replace(
        given,
        arguments={
            each: value.to(device) if isinstance(value, torch.Tensor) else value
            for each, value in given.arguments.items()
        },
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*borrows")
        found = of_kind.outputs(there, logits=logits, tp_group=dist.group.WORLD)
    of_kind.total(found, given).backward()
    values, bounds = of_kind.truth(given)
    found = {what: value for what, value in found.items() if value is not None}
    for what, value in found.items():
        close(what, value, values[what], bounds[what], (name, given.whole.dtype))
    wanted, bound = (each["gradient"].chunk(size, -1)[rank] for each in (values, bounds))
    close("gradient", leaf.grad, wanted, bound, (name, given.whole.dtype))
    return [each.detach().cpu().numpy().tobytes() for each in found.values()]


def against_float64(kind: str, first: int, last: int) -> tuple[list[bytes], dict[str, float]]:
    """Runs on a rank: cases of a kind, every second one out of hidden states as well.

    What was found, as bytes, and the largest parts of the bounds.
    """
    import hidden_cases

    of_kind, size = importlib.import_module(kind), dist.get_world_size()
    found = []
    for seed in range(first, last):
        found += within_bounds(of_kind.case(seed, size), seed, kind=kind)
        if seed % 2:
            found += hidden_cases.within_bounds(kind, seed // 2)
    return found, USED
