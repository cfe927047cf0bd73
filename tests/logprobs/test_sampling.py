"""Over what top-k, top-p or an engine's ids leave of the vocabulary."""

from __future__ import annotations

import dataclasses
import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_idempotent import token_logprobs
from megatron_idempotent.logprobs import Sampling

H, V = 8, 4096


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
            total = 0.0
            for place in of_row.argsort(descending=True).tolist():
                lowest = float(of_row[place])
                total += float(p[place])
                if total >= sampling.top_p:
                    break
            left &= of_row >= lowest
        kept[row] = left
    return kept


def _case(seed: int, size: int) -> dict[str, Any]:
    """Hidden states and a weight whose logits are whole numbers of 1/8, exact in every type."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape = draw.choice([(), (6,), (3, 4), (0, 3), (4, 1, 3)])
    local = draw.choice([2, 5, 40])
    real = local * size - draw.choice([0, 1, local])
    real = max(real, 1)
    hidden = torch.randint(-4, 5, (*shape, H)).double() / 4
    weight = torch.randint(-4, 5, (local * size, H)).double() / 4
    temperature = draw.choice([1.0, 0.7, torch.rand(shape) + 0.5])
    mode = draw.choice(["keep", "-inf"])
    kind = draw.choice(["k", "p", "both", "keep"])
    more: dict[str, Any] = {"target": mode}
    if kind in ("k", "both"):
        more["top_k"] = draw.choice([1, 3, real, real + 9])
    if kind in ("p", "both"):
        more["top_p"] = draw.choice([1e-6, 0.5, 0.9, 0.999])
    if kind == "keep":
        keep = torch.randint(-2, real, (*shape, draw.choice([1, 4, 9])))
        keep[..., 0] = keep[..., 0].clamp(min=0)
        more["keep"] = keep
    else:
        more["candidates"] = draw.choice([None, 1, 2, 7])
    return {
        "hidden": hidden,
        "weight": weight,
        "dtype": draw.choice([torch.float32, torch.bfloat16, torch.float64]),
        "real": real,
        "targets": torch.randint(0, real, shape),
        "temperature": temperature,
        "sampling": Sampling(**more),
        "entropy": draw.choice(["none", "metric", "grad"]),
        "mask": torch.rand(shape) < draw.choice([0.0, 0.7, 1.0]),
        "ownership": draw.choice(["borrow", "consume"]),
        "workspace_bytes": draw.choice([1, 1000, None]),
        "layout": draw.choice(["plain", "transposed", "sliced"]),
        "weights": torch.randn(2, *shape, dtype=torch.float64),
    }


def _truth(given: dict[str, Any]) -> dict[str, Any]:
    shape = given["targets"].shape
    hidden = given["hidden"].clone().requires_grad_()
    weight = given["weight"].clone().requires_grad_()
    logits = (hidden @ weight.t())[..., : given["real"]]
    logits.retain_grad()
    temperature = torch.as_tensor(given["temperature"], dtype=torch.float64).expand(shape)
    flat, sampling = logits.detach().reshape(-1, given["real"]), given["sampling"]
    if sampling.keep is not None:
        keep = sampling.keep.reshape(-1, sampling.keep.shape[-1])
        sampling = dataclasses.replace(sampling, keep=keep)
    kept = _kept(flat, temperature.reshape(-1), sampling).view(logits.shape)
    target = given["targets"][..., None]
    inside = kept.gather(-1, target).squeeze(-1)
    if sampling.target == "keep":
        kept = kept.scatter(-1, target, torch.ones_like(target, dtype=torch.bool))
        inside = torch.ones_like(inside)
    scaled = (logits / temperature[..., None]).masked_fill(~kept, -1e30)  # whose p is 0
    logp = torch.log_softmax(scaled, -1)
    p = logp.exp()
    entropy = -torch.where(kept, p * logp, 0.0).sum(-1)
    logprob = logp.gather(-1, target).squeeze(-1)
    used = given["mask"] & inside
    total = torch.where(used, logprob * given["weights"][0], 0.0).sum()
    if given["entropy"] == "grad":
        total = total + torch.where(given["mask"], entropy * given["weights"][1], 0.0).sum()
    total.backward()
    masked = lambda value: torch.where(given["mask"], value, 0.0).detach()  # noqa: E731
    lse = torch.logsumexp(scaled, -1)
    gradient = torch.nn.functional.pad(logits.grad, (0, len(weight) - given["real"]))
    return {
        "logprob": masked(torch.where(inside, logprob, -torch.inf)),
        "entropy": masked(entropy),
        "lse": masked(lse),
        "logits": gradient,
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


def _close(value: Any, expected: Any, dtype: Any, name: str) -> None:
    """Sums of fewer than 200 terms of numbers below 32, and the rounding of a result's type."""
    computed = 2.0**-52 if dtype == torch.float64 else 2.0**-23
    rounded = torch.finfo(dtype).eps if name in ("logits", "hidden", "weight") else computed
    # Products of gradients that were rounded, for up to 12 tokens or 160 columns.
    scale = 1.0 if name == "logits" else 16.0
    torch.testing.assert_close(
        value.double(),
        expected,
        rtol=200 * computed + rounded,
        atol=(400 * computed + scale * rounded) * (0.01 if name == "logits" else 1.0),
        msg=lambda text: f"{name}: {text}",
    )


def against_float64(cases: int) -> list[bytes]:
    """Runs on a rank that shares the vocabulary with all others; returns what it found, as
    bytes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[bytes] = []
    for seed in range(cases):
        given = _case(seed, size)
        expected = _truth(given)
        dtype = given["dtype"]
        weight = given["weight"].chunk(size)[rank].to(dtype)
        hidden = given["hidden"].to(dtype)
        leaf = (hidden @ weight.t()).requires_grad_()
        logits = leaf * 1
        if given["layout"] == "transposed" and leaf.dim() > 2:
            logits = leaf.transpose(0, 1).contiguous().transpose(0, 1)
        elif given["layout"] == "sliced" and leaf.dim() > 1 and leaf.numel():
            logits = torch.cat([leaf, leaf[..., :1, :]], -2)[..., :-1, :]
        common = {
            "targets": given["targets"],
            "tp_group": dist.group.WORLD,
            "vocab_size": given["real"],
            "temperature": given["temperature"],
            "entropy": given["entropy"],
            "token_mask": given["mask"],
            "sampling": given["sampling"],
            "workspace_bytes": given["workspace_bytes"],
        }
        hidden, weight = hidden.requires_grad_(), weight.clone().requires_grad_()
        for inputs in (
            {"logits": logits, "ownership": given["ownership"]},
            {"hidden": hidden, "weight": weight},
        ):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*borrows")
                stats = token_logprobs(**inputs, **common)
            for name, value in stats._asdict().items():
                if value is not None:
                    _close(value.detach(), expected[name], dtype, name)
                    found.append(value.detach().numpy().tobytes())
            weights = given["weights"].to(stats.logprob.dtype)
            total = torch.where(stats.logprob > -torch.inf, stats.logprob * weights[0], 0.0).sum()
            if given["entropy"] == "grad":
                total = total + (stats.entropy * weights[1]).sum()
            total.backward()
        _close(leaf.grad, expected["logits"].chunk(size, -1)[rank], dtype, "logits")
        _close(hidden.grad, expected["hidden"], dtype, "hidden")
        _close(weight.grad, expected["weight"].chunk(size)[rank], dtype, "weight")
        found.append(hidden.grad.float().numpy().tobytes())
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_over_what_is_kept_and_alike_on_all_ranks(megatron_ranks, ranks):
    first, *others = megatron_ranks(ranks, against_float64, 80)
    assert all(other == first for other in others)


def odd() -> None:
    """Runs on one of two ranks: NaN stays in its row, and columns of -inf are not there."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    whole = torch.randn(4, 2 * V)
    whole[1, V + 7] = torch.nan
    whole[2, V:] = -torch.inf
    targets = torch.tensor([5, 6, 7, V + 9])
    for sampling in (
        Sampling(top_k=3),
        Sampling(top_p=0.3),
        Sampling(top_k=V + 5, target="-inf"),
        Sampling(keep=torch.tensor([[V + 7, V + 8, 5]] * 4)),
    ):
        logits = whole.chunk(2, -1)[rank].clone().requires_grad_()
        stats = token_logprobs(
            logits=logits,
            targets=targets,
            tp_group=dist.group.WORLD,
            entropy="grad",
            sampling=sampling,
        )
        torch.where(stats.logprob > -torch.inf, stats.logprob + stats.entropy, 0.0).sum().backward()
        for value in (stats.logprob, stats.entropy):
            assert value.isnan().tolist() == [False, True, False, False], (sampling, value)
        assert logits.grad[[0, 2, 3]].isfinite().all()
        if rank:
            assert not logits.grad[2].any()


def test_nan_stays_in_its_row_and_columns_of_minus_infinity_have_no_part(megatron_ranks):
    megatron_ranks(2, odd)


def test_targets_of_probability_zero_leave_the_rest_finite_and_have_no_gradient():
    """Targets that are not kept, or that no sampler could have taken."""
    torch.manual_seed(0)
    targets = torch.arange(3)
    for sampling in (
        None,
        Sampling(top_k=3),
        Sampling(top_k=V - 1),
        Sampling(top_p=0.5),
        Sampling(top_p=1 - 1e-9),
        Sampling(keep=torch.arange(9)[None].expand(3, -1).contiguous()),
    ):
        logits = torch.randn(3, V)
        logits[1:, :3] = torch.where(torch.eye(3)[1:] > 0, -torch.inf, 1.0)
        logits.requires_grad_()
        stats = token_logprobs(logits=logits, targets=targets, entropy="grad", sampling=sampling)
        assert stats.logprob.isfinite().tolist() == [True, False, False]
        assert stats.entropy.isfinite().all()
        stats.entropy.sum().backward()
        assert logits.grad.isfinite().all()
    logits = torch.randn(3, V).scatter_(1, targets[:, None], -9.0).requires_grad_()
    for cut in (
        {"top_k": 3},
        {"top_p": 0.5},
        {"keep": torch.arange(9)[None].expand(3, -1) + 3},
    ):
        sampling = Sampling(**cut, target="-inf")
        stats = token_logprobs(logits=logits, targets=targets, sampling=sampling)
        assert (stats.logprob == -torch.inf).all()
        ones = torch.ones_like(stats.logprob)
        (gradient,) = torch.autograd.grad(stats.logprob, logits, ones)
        assert not gradient.any()


def test_settings_that_leave_nothing_out_and_those_that_mean_the_same():
    arguments = {"logits": torch.randn(2, 9), "targets": torch.tensor([1, 2])}
    plain = token_logprobs(**arguments).logprob
    for sampling in (Sampling(), Sampling(top_k=9), Sampling(top_k=-1), Sampling(top_k=None)):
        assert torch.equal(token_logprobs(**arguments, sampling=sampling).logprob, plain)
    ids = torch.tensor([[1, 4], [2, -1]])
    for one, other in (
        (Sampling(top_k=None, top_p=0.6), Sampling(top_p=0.6)),
        (Sampling(top_k=None, keep=ids.int()), Sampling(keep=ids)),
    ):
        found, wanted = (
            token_logprobs(**arguments, sampling=each).logprob for each in (one, other)
        )
        assert torch.equal(found, wanted)
        assert not torch.equal(found, plain)
    empty = Sampling(keep=torch.zeros(2, 0, dtype=torch.int64))
    assert not token_logprobs(**arguments, sampling=empty).logprob.any()  # the target alone
