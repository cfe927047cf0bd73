"""The K most likely tokens, and the divergence from a teacher that names no more than those."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import several_targets
import torch
import torch.distributed as dist
from cases import USED, Case, close

from megatron_idempotent import TokenStats, token_logprobs
from megatron_idempotent.logprobs import topk_kl, vocab_topk

H = 8


def _case(seed: int, size: int) -> dict[str, Any]:
    """Hidden states and a weight whose logits are whole numbers of 1/8, of which many are equal."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape = draw.choice([(), (6,), (3, 4), (0, 3), (4, 1, 3)])
    local = draw.choice([2, 5, 40])
    real = max(1, local * size - draw.choice([0, 1, local]))
    return {
        "hidden": torch.randint(-4, 5, (*shape, H)).double() / 4,
        "weight": torch.randint(-4, 5, (local * size, H)).double() / 4,
        "dtype": draw.choice([torch.float32, torch.bfloat16, torch.float64]),
        "real": real,
        "k": draw.choice([1, min(real, 3), min(real, local + 1), real]),
        "temperature": draw.choice([1.0, 0.7, torch.rand(shape) + 0.5]),
        "mask": torch.rand(shape) < draw.choice([0.0, 0.7, 1.0]),
        "workspace_bytes": draw.choice([1, 1000, None]),
        "gone": draw.choice([0.0, 0.0, 0.5]),
        "far": draw.choice([0.0, 0.0, 150.0]),
    }


def truth(logits: Any, ids: Any, arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Values in float64 of these ids, by name, and bounds: those of log-probs of K targets.

    What is found of the most likely tokens are their log-probs and that of the rest, of sums with
    the same roundings, or fewer: candidates are added up in float64.
    """
    how = {name: arguments[name] for name in ("vocab_size", "temperature", "token_mask")}
    weights = torch.zeros(*ids.shape[:-1], ids.shape[-1] + 1)
    arguments = {"targets": ids, "entropy": "none", **how}
    return several_targets.truth(Case(logits, arguments, "plain", weights, None))


def most_likely(cases: int) -> tuple[list[bytes], dict[str, float]]:
    """Runs on a rank that shares the vocabulary with all others; what it found, as bytes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[bytes] = []
    for seed in range(cases):
        given = _case(seed, size)
        dtype, real, k, mask = (given[name] for name in ("dtype", "real", "k", "mask"))
        hidden, weight = (given[name].to(dtype) for name in ("hidden", "weight"))
        whole = hidden @ weight.t()
        # None of the first column, so that each token has a probability somewhere.
        gone = (torch.rand_like(whole.float()) < given["gone"]) & (torch.arange(len(weight)) > 0)
        logits = whole.masked_fill(gone, -torch.inf)
        logits[..., 0] += given["far"]  # of which all others together are next to nothing
        common = {
            "k": k,
            "tp_group": dist.group.WORLD,
            "vocab_size": real,
            "temperature": given["temperature"],
            "token_mask": mask,
            "workspace_bytes": given["workspace_bytes"],
        }
        inputs = [(logits, {"logits": logits.chunk(size, -1)[rank]})]
        inputs += [(whole, {"hidden": hidden, "weight": weight.chunk(size)[rank]})]
        for made, form in inputs:
            topk = vocab_topk(**form, **common)
            ordered = made.double()[..., :real].sort(dim=-1, descending=True, stable=True)
            assert torch.equal(topk.ids[mask], ordered.indices[mask][:, :k]), seed
            assert (topk.ids[~mask] == -100).all()
            values, bounds = truth(made, topk.ids, common)
            for name in ("logprob", "rest", "lse"):
                close(name, getattr(topk, name), values[name], bounds[name], (seed, dtype))
            found += [each.numpy().tobytes() for each in topk]
            assert not any(each.requires_grad for each in topk)
    return found, USED


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_most_likely_tokens_are_found_lowest_id_first_and_alike_on_all_ranks(
    megatron_ranks, ranks
):
    (first, used), *others = megatron_ranks(ranks, most_likely, 40)
    print(f"parts of their bounds that errors have: {used}")
    assert all(other == first for other, _ in others)


def _divergence(p: Any, q: Any) -> Any:
    """Σ p·log(p / q), of outcomes [..., K]."""
    ratio = torch.where(p > 0, p, 1.0) / torch.where(p > 0, q, 1.0)
    return (p * ratio.log()).sum(-1)


TAILS, DIRECTIONS = ("bucket", "ignore", "renormalize"), ("forward", "reverse", "mixed")
#: The shares of the forward and of the reverse direction, with a mix of 0.3.
SHARES = {"forward": (1.0, 0.0), "reverse": (0.0, 1.0), "mixed": (0.3, 0.7)}
#: In float64 both sides' sums differ by fewer than 120 roundings of summands below 60: logarithms
#: below 10, times a weight below 3 and 1 / temperature, which is at most 2.
EXACT = {"rtol": 0.0, "atol": 2.0**-40}


def of_a_teachers_tokens() -> list[bytes]:
    """Runs on a rank that shares the vocabulary: each tail and direction, as their words say it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    columns, k = 30 * size, 5
    real = columns - 3
    whole, teacher = torch.randn(2, 4, 3, columns, dtype=torch.float64)
    mask, temperature = torch.rand(4, 3) < 0.7, torch.rand(4, 3) + 0.5
    common: dict[str, Any] = {"vocab_size": real, "token_mask": mask, "temperature": temperature}
    common["tp_group"] = dist.group.WORLD
    topk = vocab_topk(logits=teacher.chunk(size, -1)[rank], k=k, **common)
    ids = topk.ids.clone()
    ids[..., -1] = torch.where(torch.arange(3) == 1, -100, ids[..., -1])  # some have fewer
    valid = ids >= 0
    t = topk.logprob.exp() * valid
    # That an entry was left out is something that the rest of vocab_topk does not know.
    rest = topk.rest.exp() + (topk.logprob.exp() * ~valid).sum(-1)
    weights = torch.randn(4, 3, dtype=torch.float64)
    kl_bytes = []
    for tail, direction, with_rest in itertools.product(TAILS, DIRECTIONS, (False, True)):
        exact = whole.clone().requires_grad_()
        scaled = exact[..., :real] / temperature.double()[..., None]
        s = torch.softmax(scaled, -1).gather(-1, ids.clamp(min=0)) * valid
        p, q = t, s
        if tail == "bucket":
            p, q = (
                torch.cat([named, others[..., None]], -1)
                for named, others in ((t, rest), (s, 1 - s.sum(-1)))
            )
        elif tail == "renormalize":
            p, q = (p_K / p_K.sum(-1, keepdim=True).clamp(min=1e-99) for p_K in (t, s))
        of_both = zip(SHARES[direction], ((p, q), (q, p)), strict=True)
        expected_kl = sum(share * _divergence(*pair) for share, pair in of_both if share)
        expected_kl = torch.where(mask, expected_kl, 0.0)
        expected_kl.backward(torch.where(mask, weights, 0.0))
        leaf = whole.chunk(size, -1)[rank].clone().requires_grad_()
        stats = token_logprobs(logits=leaf, targets=ids, **common)
        how: dict[str, Any] = {"tail": tail, "direction": direction, "mix": 0.3, "valid": valid}
        how["teacher_rest"] = rest.log() if with_rest and tail == "bucket" else None
        divergence = topk_kl(stats, topk.logprob, **how)
        divergence.kl.backward(weights)
        name = f"{tail}, {direction}, {with_rest}"
        gradient = exact.grad.chunk(size, -1)[rank]
        masses = (torch.where(mask, p_K.detach().sum(-1), 0.0) for p_K in (s, t))
        for value, expected in zip(
            (leaf.grad, *divergence), (gradient, expected_kl, *masses), strict=True
        ):
            torch.testing.assert_close(value.detach(), expected.detach(), **EXACT, msg=name)
        assert not divergence.student_mass.requires_grad
        assert not divergence.teacher_mass.requires_grad
        kl_bytes.append(divergence.kl.detach().numpy().tobytes())
    # All of a vocabulary is the divergence of the whole, whatever is done to a tail of nothing.
    every = vocab_topk(logits=teacher.chunk(size, -1)[rank], k=real, **common)
    shard = whole.chunk(size, -1)[rank].contiguous()
    stats = token_logprobs(logits=shard, targets=every.ids, **common)
    scale = temperature.double()[..., None]
    s, t = (torch.softmax(logits[..., :real] / scale, -1) for logits in (whole, teacher))
    for tail, direction in itertools.product(TAILS, ("forward", "reverse")):
        kl = topk_kl(stats, every.logprob, tail=tail, direction=direction).kl
        expected_kl = _divergence(*((t, s) if direction == "forward" else (s, t)))
        torch.testing.assert_close(kl, torch.where(mask, expected_kl, 0.0), **EXACT)
    return kl_bytes


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tail_is_what_its_words_say(megatron_ranks, ranks):
    first, *others = megatron_ranks(ranks, of_a_teachers_tokens)
    assert all(other == first for other in others)


def test_a_divergence_is_computed_in_float64_and_rounded_once():
    """Stats of float32 have the divergence of the same numbers in float64."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(2, 12, 40) * 3
    topk = vocab_topk(logits=teacher, k=5)
    for tail, direction in itertools.product(TAILS, DIRECTIONS):
        how = {"tail": tail, "direction": direction, "mix": 0.3}
        leaf = logits.clone().requires_grad_()
        narrow = token_logprobs(logits=leaf, targets=topk.ids)
        wide = TokenStats(*(x if x is None else x.detach().double() for x in narrow))
        rounded = topk_kl(narrow, topk.logprob, teacher_rest=topk.rest, **how)
        exact = topk_kl(wide, topk.logprob.double(), teacher_rest=topk.rest.double(), **how)
        assert all(map(torch.equal, rounded, (x.float() for x in exact))), (tail, direction)


def test_a_tail_of_next_to_nothing_is_exact_where_the_teacher_says_it():
    """A tail that no sum of float32 could tell from nothing, on either side."""
    logits, teacher = torch.zeros(2, 2, 100)
    logits[:, 3], teacher[:, 3] = 60.0, 50.0
    logits[1, 4], teacher[1, 4] = 61.0, 51.0

    def divergence(logits: Any, teacher: Any) -> Any:
        topk = vocab_topk(logits=teacher, k=2)
        stats = token_logprobs(logits=logits, targets=topk.ids)
        return topk_kl(stats, topk.logprob, teacher_rest=topk.rest, direction="mixed").kl

    leaf = logits.clone().requires_grad_()
    kl, expected_kl = divergence(leaf, teacher), divergence(logits.double(), teacher.double())
    assert (expected_kl > 0).all()
    assert (expected_kl < 1e-17).all()
    # The rests are logarithms below 64 of float32: each is off by 2⁻¹⁹ at the most.
    torch.testing.assert_close(kl.detach().double(), expected_kl, rtol=4 * 2.0**-19, atol=0)
    kl.sum().backward()
    assert leaf.grad.isfinite().all()
    # What is not told is no less than rounding: of a rest that somebody has, no infinity is made.
    topk = vocab_topk(logits=teacher, k=2)
    stats = token_logprobs(logits=torch.zeros(2, 100), targets=topk.ids)
    assert topk_kl(stats, topk.logprob, direction="reverse").kl.isfinite().all()


def test_an_infinite_divergence_says_so_and_moves_nothing():
    """One side gives probability where the other gives none: that token alone does not move."""
    torch.manual_seed(0)
    for tokens in (3, 24):  # few of many, so that all are differentiated
        logits, teacher = torch.randn(2, tokens, 40)
        logits[0, 3] = teacher[1, 5] = -torch.inf
        logits[2, 7] = teacher[2, 7] = -torch.inf
        ids = torch.arange(8).expand(tokens, -1)
        for direction, infinite in (("forward", [0]), ("reverse", [1]), ("mixed", [0, 1])):
            for weights in (torch.ones(tokens), (torch.arange(tokens) > 1).float()):
                leaf = logits.clone().requires_grad_()
                stats = token_logprobs(logits=leaf, targets=ids)
                kl = topk_kl(stats, teacher.log_softmax(-1)[:, :8], direction=direction).kl
                kl.backward(weights)
                assert (kl == torch.inf).nonzero()[:, 0].tolist() == infinite
                assert leaf.grad.isfinite().all()
                still = (~leaf.grad.any(-1)).nonzero()[:, 0].tolist()
                assert still == (infinite if weights.all() else [0, 1])
