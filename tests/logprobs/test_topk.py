"""The K most likely tokens, and the divergence from a teacher that names no more than those."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import several_targets
import torch
import torch.distributed as dist
from cases import USED, Case, U, close
from ranks import on_ranks

from megatron_idempotent import token_logprobs
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


def of_outcomes(
    student_K: Any,
    teacher_K: Any,
    shares: tuple[float, float],
    of_student_K: Any,
    of_teacher_K: Any,
    *,
    renormalized: bool = False,
) -> tuple[Any, Any, Any, Any]:
    """The divergence of K outcomes out of log-probs in float64, its gradient, and a bound of each.

    Returns (divergence, bound, gradient by the student's log-probs, bound). Log-probs that are off
    by so much move a result by its derivatives times that, to first order, and a result of float32
    is rounded once. Outcomes without probability are -inf on both sides.
    """
    u, there_K = U[torch.float32], student_K > -torch.inf
    inputs = [torch.where(there_K, x_K, 0.0).requires_grad_() for x_K in (student_K, teacher_K)]
    offs = [torch.where(there_K, off_K, 0.0) for off_K in (of_student_K, of_teacher_K)]

    def distribution(logprob_K: Any) -> tuple[Any, Any]:
        if renormalized:
            none = torch.where(there_K, 0.0, -1e30)
            total = (logprob_K + none).logsumexp(-1, keepdim=True)
            logprob_K = logprob_K - torch.where(total > -1e29, total, 0.0)
        return logprob_K.exp() * there_K, logprob_K

    (s, log_s), (t, log_t) = (distribution(logprob_K) for logprob_K in inputs)
    forward, reverse = shares
    value = ((forward * t - reverse * s) * (log_t - log_s)).sum(-1)

    def moved(derivatives: Any) -> Any:
        pairs = zip(derivatives, offs, strict=True)
        return sum((derivative.abs() * off).sum(-1) for derivative, off in pairs)

    derivatives = torch.autograd.grad(value.sum(), inputs, create_graph=True)
    of_gradients = [
        moved(torch.autograd.grad(gradient.sum(), inputs, retain_graph=True))
        for gradient in derivatives[0].unbind(-1)
    ]
    gradient_K = derivatives[0].detach()
    of_gradient_K = torch.stack(of_gradients, -1) + 2 * u * gradient_K.abs()
    value = value.detach()
    of_value = (moved(derivatives) + 2 * u * value.abs()).detach()
    return value, of_value, gradient_K, of_gradient_K


#: The shares of the forward and of the reverse direction, with a mix of 0.3.
SHARES = {"forward": (1.0, 0.0), "reverse": (0.0, 1.0), "mixed": (0.3, 0.7)}


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
        shares = SHARES[direction]
        of_both = zip(shares, ((p, q), (q, p)), strict=True)
        wanted = sum(share * _divergence(*pair) for share, pair in of_both if share)
        wanted = torch.where(mask, wanted, 0.0)
        wanted.backward(torch.where(mask, weights, 0.0))
        leaf = whole.chunk(size, -1)[rank].clone().requires_grad_()
        arguments = {"tail": tail, "direction": direction, "mix": 0.3}
        teacher_rest = rest.log().float() if given and tail == "bucket" else None
        stats = token_logprobs(logits=leaf, targets=ids, **common)
        of_teacher = {"teacher_rest": teacher_rest, "valid": valid}
        ours = topk_kl(stats, topk.logprob, **of_teacher, **arguments)
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
        computed = of_outcomes(
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
    # All of a vocabulary is the divergence of the whole, whatever is done to a tail of nothing.
    every = vocab_topk(logits=teacher.chunk(size, -1)[rank], k=real, **common)
    sides = [truth(logits, every.ids, how) for logits in (whole, teacher)]
    own, others = (side[0]["logprob"].masked_fill(~mask[..., None], -torch.inf) for side in sides)
    offs = [side[1]["logprob"] for side in sides]
    stats = token_logprobs(
        logits=whole.chunk(size, -1)[rank].contiguous(), targets=every.ids, **common
    )
    scale = temperature.double()[..., None]
    s, t = (torch.softmax(logits.double()[..., :real] / scale, -1) for logits in (whole, teacher))
    for tail, direction in itertools.product(
        ("bucket", "ignore", "renormalize"), ("forward", "reverse")
    ):
        kl = topk_kl(stats, every.logprob, tail=tail, direction=direction).kl
        exact = torch.where(mask, _divergence(*((t, s) if direction == "forward" else (s, t))), 0.0)
        renormalized = tail == "renormalize"
        computed = of_outcomes(own, others, SHARES[direction], *offs, renormalized=renormalized)
        # Both sides' sums in float64 differ by fewer than 120 roundings of summands below 10.
        close("kl of all", kl, exact, computed[1] + 2.0**-40, (tail, direction))
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
    stats = token_logprobs(logits=leaf, targets=topk.ids)
    kl = topk_kl(stats, topk.logprob, teacher_rest=topk.rest, direction="mixed").kl
    # Tokens beside which all others are nothing have the same bits on both sides, so that their
    # errors cancel.
    alike = torch.cat([stats.logprob == topk.logprob, torch.zeros(2, 1, dtype=torch.bool)], -1)
    assert alike.tolist() == [[True, False, False], [True, True, False]]
    sides = [
        torch.cat([each["logprob"], each["rest"][:, None]], -1)
        for each in (student, taught, of_student, of_taught)
    ]
    offs = [torch.where(alike, 0.0, each) for each in sides[2:]]
    wanted, bound, *_ = of_outcomes(*sides[:2], (0.5, 0.5), *offs)
    assert (bound < 1e-3 * wanted).all()  # or it would say nothing
    close("kl", kl, wanted, bound, "next to nothing")
    kl.sum().backward()
    assert leaf.grad.isfinite().all()
    # What is not told is no less than rounding: of a rest that somebody has, no infinity is made.
    stats = token_logprobs(logits=torch.zeros(2, 100), targets=topk.ids)
    assert topk_kl(stats, topk.logprob, direction="reverse").kl.isfinite().all()
    print(f"parts of their bounds that errors have: {USED}")


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
