"""The K most likely tokens, and the divergence from a teacher that names no more than those."""

from __future__ import annotations

from typing import Any

import pytest

H = 8


def _case(seed: int, size: int) -> dict[str, Any]:
    """Hidden states and a weight whose logits are whole numbers of 1/8, of which many are equal."""
    import random

    import torch

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


def most_likely(cases: int) -> list[bytes]:
    """Runs on a rank that shares the vocabulary with all others; what it found, as bytes."""
    import torch
    import torch.distributed as dist
    from cases import additions

    from megatron_idempotent import vocab_topk

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
            exact = made.double()[..., :real]
            ordered = exact.sort(dim=-1, descending=True, stable=True)
            assert torch.equal(topk.ids[mask], ordered.indices[mask][:, :k]), seed
            assert (topk.ids[~mask] == -100).all()
            scale = torch.as_tensor(given["temperature"], dtype=torch.float64)[..., None]
            logp = torch.log_softmax(ordered.values / scale, -1)
            left = logp[..., k:].logsumexp(-1) if k < real else torch.full(mask.shape, -torch.inf)
            # Roundings of z, of exp and of the sums over fewer than 200 columns, and of the result;
            # and of a temperature that is no number of float32.
            u = torch.finfo(topk.logprob.dtype).eps
            finite = exact[exact > -torch.inf]
            z = 2 * float(finite.amax() - finite.amin()) if len(finite) else 0.0
            bound = u * (6 * z + additions(real) + 12)
            lse = (exact / scale).logsumexp(-1)
            wanted = {"logprob": logp[..., :k], "rest": left, "lse": lse}
            for name, value in wanted.items():
                ours = getattr(topk, name)
                computed = mask if value.shape == mask.shape else mask[..., None]
                value = torch.where(computed, value, 0.0)
                error = torch.where(ours == value, 0.0, (ours - value).abs())
                beyond = error / (bound + u * value.abs())
                assert (beyond.nan_to_num(0.0) <= 1).all(), (seed, name, beyond)
            found += [each.numpy().tobytes() for each in topk]
            assert not any(each.requires_grad for each in topk)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_most_likely_tokens_are_found_lowest_id_first_and_alike_on_all_ranks(
    megatron_ranks, ranks
):
    first, *others = megatron_ranks(ranks, most_likely, 60)
    assert all(other == first for other in others)


def _shares(direction: str) -> tuple[float, float]:
    return {"forward": (1.0, 0.0), "reverse": (0.0, 1.0), "mixed": (0.3, 0.7)}[direction]


def _divergence(p: Any, q: Any) -> Any:
    """Σ p·log(p / q), of outcomes [..., K]."""
    import torch

    ratio = torch.where(p > 0, p, 1.0) / torch.where(p > 0, q, 1.0)
    return (p * ratio.log()).sum(-1)


def of_a_teachers_tokens() -> list[bytes]:
    """Runs on a rank that shares the vocabulary: each tail and direction, as their words say it."""
    import itertools

    import torch
    import torch.distributed as dist

    from megatron_idempotent import token_kl, token_logprobs, topk_kl, vocab_topk

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    columns, k = 30 * size, 5
    real = columns - 3
    whole, teacher = torch.randn(2, 4, 3, columns)
    mask, temperature = torch.rand(4, 3) < 0.7, torch.rand(4, 3) + 0.5
    common: dict[str, Any] = {
        "tp_group": dist.group.WORLD,
        "vocab_size": real,
        "token_mask": mask,
        "temperature": temperature,
    }
    topk = vocab_topk(logits=teacher.chunk(size, -1)[rank], k=k, **common)
    ids = topk.ids.clone()
    ids[..., -1] = torch.where(torch.arange(3) == 1, -100, ids[..., -1])  # some have fewer
    valid = ids >= 0
    t = topk.logprob.double().exp() * valid
    weights = torch.randn(4, 3, dtype=torch.float64)
    found = []
    for tail, direction, given in itertools.product(
        ("bucket", "ignore", "renormalize"), ("forward", "reverse", "mixed"), (False, True)
    ):
        exact = whole.double().requires_grad_()
        s = torch.softmax(exact[..., :real] / temperature.double()[..., None], -1)
        s = s.gather(-1, ids.clamp(min=0)) * valid
        p, q = t, s
        if tail == "bucket":
            # That an entry was left out is something that the rest of vocab_topk does not know.
            rest = topk.rest.double().exp() + (topk.logprob.double().exp() * ~valid).sum(-1)
            p, q = (
                torch.cat([each, left[..., None]], -1)
                for each, left in ((t, rest), (s, 1 - s.sum(-1)))
            )
        elif tail == "renormalize":
            p, q = (each / each.sum(-1, keepdim=True).clamp(min=1e-99) for each in (t, s))
        forward, reverse = _shares(direction)
        of_both = zip((forward, reverse), ((p, q), (q, p)), strict=True)
        wanted = sum(share * _divergence(*pair) for share, pair in of_both if share)
        wanted = torch.where(mask, wanted, 0.0)
        wanted.backward(torch.where(mask, weights, 0.0))
        leaf = whole.chunk(size, -1)[rank].clone().requires_grad_()
        how = {"tail": tail, "direction": direction, "mix": 0.3}
        teacher_rest = rest.log().float() if given and tail == "bucket" else None
        of_k = {"teacher_logprobs": topk.logprob, "teacher_rest": teacher_rest}
        ours = token_kl(logits=leaf, teacher_ids=ids, **of_k, **how, **common)
        ours.kl.backward(weights.float())
        # Log-probs of float32, of up to 20 nats, each off by the roundings of z and of a sum of
        # fewer than 64 terms; a rest that is 1 less k of theirs is off by as much, its logarithm
        # by that over the rest. A gradient is a product of two such.
        least = float(rest[mask].min()) if tail == "bucket" and not given else 1.0
        bound = 2.0**-24 * (64 + 3 * 20) * (2 + k / least)
        assert (ours.kl - wanted).abs().max() <= bound, (tail, direction, given)
        of_logits = exact.grad.chunk(size, -1)[rank]
        assert (leaf.grad - of_logits).abs().max() <= bound * float(weights.abs().max()) * 2
        for mass, value in ((ours.student_mass, s.sum(-1)), (ours.teacher_mass, t.sum(-1))):
            assert (mass - torch.where(mask, value, 0.0)).abs().max() <= bound
            assert not mass.requires_grad
        found.append(ours.kl.detach().numpy().tobytes())
        # Out of log-probs that somebody has computed already it is the same.
        stats = token_logprobs(logits=leaf, targets=ids, **common)
        again = topk_kl(
            stats,
            topk.logprob,
            teacher_rest=teacher_rest,
            valid=valid,
            **how,
        )
        assert torch.equal(again.kl, ours.kl)
    # All of a vocabulary is the divergence of the whole, whatever is done to a tail of nothing.
    every = vocab_topk(logits=teacher.chunk(size, -1)[rank], k=real, **common)
    parts = [each.chunk(size, -1)[rank].contiguous() for each in (whole, teacher)]
    for tail, direction in itertools.product(
        ("bucket", "ignore", "renormalize"), ("forward", "reverse")
    ):
        of_k = {"teacher_ids": every.ids, "teacher_logprobs": every.logprob}
        kl = token_kl(logits=parts[0], **of_k, tail=tail, direction=direction, **common).kl
        given = {"teacher_logits": parts[1], "direction": direction}
        wanted = token_kl(logits=parts[0], **given, **common).kl
        assert (kl - wanted).abs().max() <= 200 * 2.0**-24 * 30
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tail_is_what_its_words_say(megatron_ranks, ranks):
    first, *others = megatron_ranks(ranks, of_a_teachers_tokens)
    assert all(other == first for other in others)


def next_to_nothing_left() -> None:
    """Runs on a rank: a tail that no sum of float32 could tell from nothing, on either side."""
    import torch

    from megatron_idempotent import token_kl, vocab_topk

    logits, teacher = torch.zeros(2, 2, 100)
    logits[:, 3], teacher[:, 3] = 60.0, 50.0
    logits[1, 4], teacher[1, 4] = 61.0, 51.0
    leaf = logits.clone().requires_grad_()
    topk = vocab_topk(logits=teacher, k=2)
    exact = [each.double().log_softmax(-1) for each in (teacher, logits)]
    named = torch.zeros(2, 100, dtype=torch.bool).scatter(-1, topk.ids, True)
    rests = [each.masked_fill(named, -torch.inf).logsumexp(-1) for each in exact]
    assert (topk.rest - rests[0]).abs().max() <= 1e-4
    t, s = (
        torch.cat([each.gather(-1, topk.ids), rest[:, None]], -1)
        for each, rest in zip(exact, rests, strict=True)
    )
    of_k = {"teacher_ids": topk.ids, "teacher_logprobs": topk.logprob, "teacher_rest": topk.rest}
    kl = token_kl(logits=leaf, **of_k, direction="mixed").kl
    wanted = 0.5 * ((t.exp() - s.exp()) * (t - s)).sum(-1)
    assert ((kl - wanted).abs() <= 1e-5 * wanted + 1e-9).all()
    kl.sum().backward()
    assert leaf.grad.isfinite().all()
    # What is not told is no less than rounding: of a rest that somebody has, no infinity is made.
    flat = torch.zeros(2, 100)
    del of_k["teacher_rest"]
    assert token_kl(logits=flat, **of_k, direction="reverse").kl.isfinite().all()


def test_a_tail_of_next_to_nothing_is_exact_where_the_teacher_says_it(megatron_ranks):
    megatron_ranks(1, next_to_nothing_left)
