"""The K most likely tokens, and the divergence from a teacher that names no more than those."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import divergences
import pytest
import several_targets
import torch
import torch.distributed as dist
from cases import USED, Case, U, close
from ranks import on_ranks

from megatron_idempotent import token_logprobs
from megatron_idempotent.logprobs import token_kl, topk_kl, vocab_topk

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


def of_a_teachers_tokens() -> tuple[list[bytes], dict[str, float]]:
    """Runs on a rank that shares the vocabulary: each tail and direction, as their words say it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    u = U[torch.float32]
    columns, k = 30 * size, 5
    real = columns - 3
    whole, teacher = torch.randn(2, 4, 3, columns)
    mask, temperature = torch.rand(4, 3) < 0.7, torch.rand(4, 3) + 0.5
    how: dict[str, Any] = {"vocab_size": real, "token_mask": mask, "temperature": temperature}
    common = {"tp_group": dist.group.WORLD, **how}
    topk = vocab_topk(logits=teacher.chunk(size, -1)[rank], k=k, **common)
    ids = topk.ids.clone()
    ids[..., -1] = torch.where(torch.arange(3) == 1, -100, ids[..., -1])  # some have fewer
    valid = ids >= 0
    t = topk.logprob.double().exp() * valid
    # That an entry was left out is something that the rest of vocab_topk does not know.
    rest = topk.rest.double().exp() + (topk.logprob.double().exp() * ~valid).sum(-1)
    weights = torch.randn(4, 3, dtype=torch.float64)
    # The student's log-probs are off by so much. The teacher's are given in float32, but for a rest
    # that is rounded, or what all others leave of 1, each off by so much.
    of_topk = truth(teacher, topk.ids, how)[1]
    values, bounds = truth(whole, ids, how)
    of_left = (topk.logprob.double().exp() * of_topk["logprob"]).sum(-1) / rest + of_topk["rest"]
    found = []
    for tail, direction, given in itertools.product(
        ("bucket", "ignore", "renormalize"), ("forward", "reverse", "mixed"), (False, True)
    ):
        exact = whole.double().requires_grad_()
        scaled = exact[..., :real] / temperature.double()[..., None]
        s = torch.softmax(scaled, -1).gather(-1, ids.clamp(min=0)) * valid
        p, q = t, s
        if tail == "bucket":
            p, q = (
                torch.cat([each, left[..., None]], -1)
                for each, left in ((t, rest), (s, 1 - s.sum(-1)))
            )
        elif tail == "renormalize":
            p, q = (each / each.sum(-1, keepdim=True).clamp(min=1e-99) for each in (t, s))
        shares = divergences.shares({"direction": direction, "mix": 0.3})
        of_both = zip(shares, ((p, q), (q, p)), strict=True)
        wanted = sum(share * _divergence(*pair) for share, pair in of_both if share)
        wanted = torch.where(mask, wanted, 0.0)
        wanted.backward(torch.where(mask, weights, 0.0))
        leaf = whole.chunk(size, -1)[rank].clone().requires_grad_()
        arguments = {"tail": tail, "direction": direction, "mix": 0.3}
        teacher_rest = rest.log().float() if given and tail == "bucket" else None
        of_k = {"teacher_logprobs": topk.logprob, "teacher_rest": teacher_rest}
        ours = token_kl(logits=leaf, teacher_ids=ids, **of_k, **arguments, **common)
        ours.kl.backward(weights.float())
        own, others = values["logprob"], topk.logprob.double()
        of_own, of_others = bounds["logprob"], torch.zeros_like(others)
        if tail == "bucket":
            of_rest = of_left if teacher_rest is None else u * rest.log().abs()
            own, others, of_own, of_others = (
                torch.cat([each, last[..., None]], -1)
                for each, last in (
                    (own, values["rest"]),
                    (others, rest.log()),
                    (of_own, bounds["rest"]),
                    (of_others, of_rest),
                )
            )
        there = torch.zeros_like(own, dtype=torch.bool)
        there[..., :k] = valid & mask[..., None]
        there[..., k:] = mask[..., None]
        own, others = (each.masked_fill(~there, -torch.inf) for each in (own, others))
        computed = divergences.of_outcomes(
            own, others, shares, of_own, of_others, renormalized=tail == "renormalize"
        )
        name = (tail, direction, given)
        close("kl of K", ours.kl, wanted.detach(), computed[1], name)
        gradient, bound = of_logits(Case(whole, how, "plain", None, None), ids, computed, weights)
        assert float((gradient - exact.grad).abs().max()) <= 2.0**-40, name  # the same, in float64
        gradient, bound = (each.chunk(size, -1)[rank] for each in (gradient, bound))
        close("gradient of K", leaf.grad, gradient, bound, name)
        of_mass = (s.detach() * bounds["logprob"]).sum(-1)
        for what, mass, value, of_value in (
            ("student", ours.student_mass, s.sum(-1).detach(), of_mass),
            ("teacher", ours.teacher_mass, t.sum(-1), 0.0),
        ):
            value = torch.where(mask, value, 0.0)
            close(f"mass of the {what}", mass, value, of_value + 2 * u * value, name)
            assert not mass.requires_grad
        found.append(ours.kl.detach().numpy().tobytes())
        # Out of log-probs that somebody has computed already it is the same.
        stats = token_logprobs(logits=leaf, targets=ids, **common)
        again = topk_kl(
            stats,
            topk.logprob,
            teacher_rest=teacher_rest,
            valid=valid,
            **arguments,
        )
        assert torch.equal(again.kl, ours.kl)
    # All of a vocabulary is the divergence of the whole, whatever is done to a tail of nothing.
    every = vocab_topk(logits=teacher.chunk(size, -1)[rank], k=real, **common)
    parts = [each.chunk(size, -1)[rank].contiguous() for each in (whole, teacher)]
    sides = [truth(each, every.ids, how) for each in (whole, teacher)]
    own, others = (each[0]["logprob"].masked_fill(~mask[..., None], -torch.inf) for each in sides)
    offs = [each[1]["logprob"] for each in sides]
    for tail, direction in itertools.product(
        ("bucket", "ignore", "renormalize"), ("forward", "reverse")
    ):
        of_k = {"teacher_ids": every.ids, "teacher_logprobs": every.logprob}
        kl = token_kl(logits=parts[0], **of_k, tail=tail, direction=direction, **common).kl
        given = {"teacher_logits": parts[1], "direction": direction}
        wanted = token_kl(logits=parts[0], **given, **common).kl
        arguments = {"direction": direction, "mix": 0.5, **how}
        nothing = torch.zeros(4, 3)
        asked = Case(whole, arguments, "plain", nothing, teacher=teacher)
        bound = divergences.truth(asked)[1]["kl"]
        shares = divergences.shares(arguments)
        renormalized = tail == "renormalize"
        computed = divergences.of_outcomes(own, others, shares, *offs, renormalized=renormalized)
        close("kl of all", kl, wanted.double(), bound + computed[1], (tail, direction))
    return found, USED


def of_logits(given: Any, ids: Any, computed: Any, weights: Any) -> tuple[Any, Any]:
    """The gradient of logits [..., V] in float64 and its bound, out of that of K log-probs.

    What the gradient of a log-prob is off by counts as that log-prob's derivative says.
    """
    arguments = {"targets": ids, "entropy": "none", **given.arguments}
    mask, size, k = arguments["token_mask"], arguments["vocab_size"], ids.shape[-1]
    *_, gradient_K, of_gradient_K = computed
    if gradient_K.shape[-1] == k:  # nothing is said of the rest
        gradient_K, of_gradient_K = (
            torch.nn.functional.pad(each, (0, 1)) for each in (gradient_K, of_gradient_K)
        )
    weights = torch.where(mask, weights, 0.0)[..., None]
    given = dataclasses.replace(given, arguments=arguments, of_logprob=gradient_K * weights)
    values, bounds = several_targets.truth(given)
    temperature = torch.as_tensor(arguments["temperature"]).double()[..., None]
    s = torch.softmax(given.whole.double()[..., :size] / temperature, -1)
    named = torch.zeros(*s.shape[:-1], size + 1, dtype=torch.bool)
    named = named.scatter(-1, torch.where(ids >= 0, ids, size), True)[..., :size]
    other = torch.where(named, 0.0, s)
    of_rest = (other / other.sum(-1, keepdim=True) - s).abs()
    more = of_gradient_K[..., -1:] * of_rest
    for number in range(k):
        one = torch.nn.functional.one_hot(ids[..., number].clamp(min=0), size)
        more = more + of_gradient_K[..., number, None] * (one - s).abs()
    more = more * weights.abs() / temperature
    padding = (0, given.whole.shape[-1] - size)
    return values["gradient"], bounds["gradient"] + torch.nn.functional.pad(more, padding)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tail_is_what_its_words_say(megatron_ranks, ranks):
    (first, used), *others = megatron_ranks(ranks, of_a_teachers_tokens)
    print(f"parts of their bounds that errors have: {used}")
    assert all(other == first for other, _ in others)


@on_ranks(1)
def test_a_tail_of_next_to_nothing_is_exact_where_the_teacher_says_it() -> None:
    """A tail that no sum of float32 could tell from nothing, on either side."""
    logits, teacher = torch.zeros(2, 2, 100)
    logits[:, 3], teacher[:, 3] = 60.0, 50.0
    logits[1, 4], teacher[1, 4] = 61.0, 51.0
    leaf = logits.clone().requires_grad_()
    topk = vocab_topk(logits=teacher, k=2)
    everyone = torch.ones(2, dtype=torch.bool)
    how = {"vocab_size": 100, "temperature": 1.0, "token_mask": everyone}
    (student, of_student), (taught, of_taught) = (
        truth(each, topk.ids, how) for each in (logits, teacher)
    )
    for name in ("logprob", "rest"):
        close(name, getattr(topk, name), taught[name], of_taught[name], "the teacher")
    of_k = {"teacher_ids": topk.ids, "teacher_logprobs": topk.logprob, "teacher_rest": topk.rest}
    kl = token_kl(logits=leaf, **of_k, direction="mixed").kl
    # Tokens beside which all others are nothing have the same bits on both sides, so that their
    # errors cancel.
    stats = token_logprobs(logits=logits, targets=topk.ids)
    alike = torch.cat([stats.logprob == topk.logprob, torch.zeros(2, 1, dtype=torch.bool)], -1)
    assert alike.tolist() == [[True, False, False], [True, True, False]]
    sides = [
        torch.cat([each["logprob"], each["rest"][:, None]], -1)
        for each in (student, taught, of_student, of_taught)
    ]
    offs = [torch.where(alike, 0.0, each) for each in sides[2:]]
    wanted, bound, *_ = divergences.of_outcomes(*sides[:2], (0.5, 0.5), *offs)
    assert (bound < 1e-3 * wanted).all()  # or it would say nothing
    close("kl", kl, wanted, bound, "next to nothing")
    kl.sum().backward()
    assert leaf.grad.isfinite().all()
    # What is not told is no less than rounding: of a rest that somebody has, no infinity is made.
    flat = torch.zeros(2, 100)
    del of_k["teacher_rest"]
    assert token_kl(logits=flat, **of_k, direction="reverse").kl.isfinite().all()
    print(f"parts of their bounds that errors have: {USED}")
