"""Random calls of `token_logprobs`, and what float64 says of them. Runs on a rank."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch

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
    of_entropy: Any

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


def case(seed: int, size: int) -> Case:
    """The same on all ranks."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape, local = draw.choice(SHAPES), draw.choice([1, 3, 17, 64])
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
    return Case(
        whole=whole.to(dtype),
        arguments=arguments,
        layout=draw.choice(["plain", "transposed", "sliced", "gaps"]),
        of_logprob=torch.randn(shape),
        of_entropy=torch.randn(shape),
    )


def additions(terms: int) -> int:
    """Bounds the additions that a term meets where torch sums up a row, on any CPU.

    torch sums in cascades: four levels of 16 additions, each in vectors of up to 16 lanes and in
    four of them side by side, which are added up at the end, and a rest of fewer than 16.
    """
    return min(terms, 4 * 16 + 3 + 3 + 16 + 16)


@dataclasses.dataclass
class Truth:
    """Values in float64, and how far off the computing type may be."""

    logprob: Any
    entropy: Any
    lse: Any
    gradient: Any
    of_logprob: Any
    of_entropy: Any
    of_lse: Any
    of_gradient: Any


def truth(given: Case) -> Truth:
    """Errors are bounds to first order in the unit roundoff u.

    z = (logit - max) / temperature carries two roundings, exp and the sums of V terms as many of
    the result as a term meets additions, and 8; what is returned carries one more. E is the mean
    under p.
    """
    arguments = given.arguments
    u = U.get(given.whole.dtype, U[torch.float32])
    dtype = torch.float64
    targets = arguments["targets"]
    kept = targets != arguments.get("ignore_index", -100)
    kept = kept & arguments.get("token_mask", kept)
    temperature = torch.as_tensor(arguments["temperature"], dtype=dtype)
    if given.whole.dtype != torch.float64:  # a number or tensor of float32 divides
        temperature = temperature.float().double()
    scale = temperature[..., None]
    size = arguments["vocab_size"] or given.whole.shape[-1]
    logits = given.whole.double()[..., :size].requires_grad_()
    logp = torch.log_softmax(logits / scale, -1)
    p = logp.exp()
    finite = logp.clamp(min=-1e30)
    entropy = -(p * finite).sum(-1)
    logprob = logp.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    total = (logprob * given.of_logprob * kept).sum()
    if arguments["entropy"] == "grad":
        total = total + (entropy * given.of_entropy * kept).sum()
    (gradient,) = torch.autograd.grad(total, logits)
    with torch.no_grad():
        z = ((logits - logits.amax(-1, keepdim=True)) / scale).clamp(min=-1e15)
        computed = torch.finfo(torch.float64 if u == U[dtype] else torch.float32)
        sums = additions(size) + 8
        log_sum = z.exp().sum(-1).log()
        z = z.abs()
        if u == U[dtype]:  # torch divides before it subtracts
            z += (logits / scale).abs().clamp(max=1e15)
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
        padding = (0, given.whole.shape[-1] - size)

        def masked(values: Any) -> Any:
            return torch.where(kept, values, 0.0)

        return Truth(
            logprob=masked(logprob.detach()),
            entropy=masked(entropy.detach()),
            lse=masked(lse),
            gradient=torch.nn.functional.pad(gradient, padding),
            of_logprob=masked(of_logprob),
            of_entropy=masked(of_entropy),
            of_lse=masked(of_log_sum + 2 * u * lse.abs()),
            of_gradient=torch.nn.functional.pad(of_gradient * kept[..., None], padding),
        )


def close(what: str, value: Any, expected: Any, bound: Any, name: object) -> None:
    """Hold values to their bounds; what is infinite is so on both sides."""
    value = value.detach().cpu().double()
    error = torch.where(value == expected, 0.0, (value - expected).abs())
    beyond = (error / bound)[~(error <= bound)].tolist()  # NaN too
    assert not beyond, f"{what} of {name}: {len(beyond)} beyond, {beyond[:9]}"
    if error.numel():
        share = float((error / bound).nan_to_num(0.0).max())
        USED[what] = max(USED.get(what, 0.0), share)


def within_bounds(given: Case, name: object, device: str = "cpu") -> list[bytes]:
    """A call on a rank that shares the vocabulary with all others, held to its bounds.

    What it found, as bytes.
    """
    import warnings

    import torch.distributed as dist

    from megatron_idempotent import token_logprobs

    rank, size = dist.get_rank(), dist.get_world_size()
    leaf, logits = given.shard(rank, size, device)
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in given.arguments.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*borrows")
        stats = token_logprobs(logits=logits, tp_group=dist.group.WORLD, **arguments)
    expected = truth(given)
    entropy = given.arguments["entropy"]
    assert (stats.entropy is None) == (entropy == "none")
    assert not stats.lse.requires_grad
    assert stats.entropy is None or stats.entropy.requires_grad == (entropy == "grad")

    def hold(what: str, value: Any) -> None:
        exact, bound = getattr(expected, what), getattr(expected, f"of_{what}")
        close(what, value, exact, bound, (name, given.whole.dtype))

    hold("logprob", stats.logprob)
    hold("lse", stats.lse)
    if stats.entropy is not None:
        hold("entropy", stats.entropy)
    total = (stats.logprob * given.of_logprob.to(device)).sum()
    if entropy == "grad":
        total = total + (stats.entropy * given.of_entropy.to(device)).sum()
    total.backward()
    expected.gradient, expected.of_gradient = (
        each.chunk(size, -1)[rank] for each in (expected.gradient, expected.of_gradient)
    )
    hold("gradient", leaf.grad)
    return [each.detach().cpu().numpy().tobytes() for each in stats if each is not None]
