"""Log-probs, entropies and their gradients against float64, for whole and shared vocabularies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import USED, Case, additions, against_float64, reference, summed, within_bounds
from ranks import on_ranks

from megatron_idempotent import token_logprobs
from megatron_idempotent.logprobs import Sampling

#: Cases of each kind by the number of ranks; others are asked for by -m exhaustive. What more than
#: two ranks may get wrong is where a part of the vocabulary begins and ends, which each case has.
CASES = {1: 60, 2: 60, 4: 20}


@pytest.mark.parametrize(
    ("ranks", "first", "last"),
    [
        *((ranks, 0, count) for ranks, count in CASES.items()),
        *(pytest.param(*each, 300, marks=pytest.mark.exhaustive) for each in CASES.items()),
    ],
)
@pytest.mark.parametrize("kind", ["cases", "several_targets", "sampled"])
def test_within_what_rounding_allows_and_alike_on_all_ranks(
    megatron_ranks, kind, ranks, first, last
):
    (found, used), *others = megatron_ranks(ranks, against_float64, kind, first, last)
    print(f"parts of their bounds that errors have: {used}")
    assert all(other == found for other, _ in others)


def confident(entropy: str) -> None:
    """Runs on a rank that shares the vocabulary: tokens that are certain up to as little as
    e⁻²⁵."""
    rank, size = dist.get_rank(), dist.get_world_size()
    columns = 512 * size
    torch.manual_seed(0)
    whole = torch.randn(26, columns)
    targets = torch.randint(1, columns, (26,))
    whole[:, 0] = -torch.inf  # which top-k leaves out
    whole.scatter_(1, targets[:, None], whole.amax(1, keepdim=True) + torch.arange(26.0)[:, None])
    exact = whole.double().requires_grad_()
    logprobs, entropies = reference(exact, targets)
    (logprobs.sum() + (entropies.sum() if entropy == "grad" else 0)).backward()
    wanted = exact.grad.chunk(size, -1)[rank]
    every = torch.arange(columns).expand(26, -1).contiguous()
    z = (exact.amax(-1, keepdim=True) - exact)[:, 1:].max()
    # Roundings of z, of exp, of sums, of mean and factors; relative to what is small.
    bound = 2.0**-24 * (3 * float(z) + additions(columns) + 12) * (2 if entropy == "grad" else 1)
    for sampling in (None, Sampling(keep=every), Sampling(top_k=columns - 1)):
        leaf = whole.chunk(size, -1)[rank].clone().requires_grad_()
        stats = token_logprobs(
            logits=leaf,
            targets=targets,
            tp_group=dist.group.WORLD,
            entropy=entropy,
            sampling=sampling,
        )
        summed(stats).backward()
        error = (leaf.grad - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert (error <= bound).all(), (sampling, (error / bound).tolist())


@pytest.mark.parametrize(("ranks", "entropy"), [(1, "none"), (2, "grad")])
def test_gradients_of_tokens_that_are_all_but_certain_are_exact(megatron_ranks, ranks, entropy):
    megatron_ranks(ranks, confident, entropy)


def of_a_model(name: str) -> list[bytes]:
    """Runs on one of two ranks: a model's logits, held to float64; what it found, as bytes.

    Rows are longer than the blocks in which torch adds them up.
    """
    torch.manual_seed(0)
    tokens, columns = 16, 8192
    whole = (torch.randn(tokens, columns) * 3).to(getattr(torch, name))
    targets = torch.randint(0, columns, (tokens,))
    # Most of the tokens are what a policy would sample.
    likely = torch.arange(tokens) % 4 > 0
    targets = torch.where(likely, whole.float().softmax(-1).multinomial(1).squeeze(1), targets)
    of_logprob, of_entropy = torch.randn(2, tokens)
    found = []
    for temperature, entropy in ((1.0, "none"), (1.0, "grad"), (0.7, "none"), (0.7, "grad")):
        how = {"vocab_size": None, "temperature": temperature, "entropy": entropy}
        given = Case(whole, {"targets": targets, **how}, "plain", of_logprob, of_entropy)
        found += within_bounds(given, how)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_errors_of_a_models_logits_are_within_what_rounding_allows(megatron_ranks, dtype):
    first, second = megatron_ranks(2, of_a_model, dtype)
    assert first == second


#: Of all logits; within some the sums of exponentials are numbers of float32, beyond not. Which of
#: exponentials of logits, and of their distances from another one, a token gets is told from these.
OFFSETS = [-1e4, -300.0, -97.0, -90.0, -70.0, -46.0, -30.0, 0.0]
OFFSETS += [40.0, 70.0, 80.0, 84.0, 87.0, 90.0, 1e4]
#: Of the target's logit alone.
TARGETS = [-1e4, -90.0, 30.0, 41.0, 61.0, 79.0, 81.0, 88.0, 90.0, 500.0]


def _whole(columns: int) -> tuple[Any, Any]:
    """One row of each kind, and its targets."""
    torch.manual_seed(1)
    offsets = torch.tensor(OFFSETS + [0.0] * len(TARGETS), dtype=torch.float64)
    whole = 2 * torch.randn(len(offsets), columns, dtype=torch.float64) + offsets[:, None]
    targets = torch.randint(0, columns, (len(offsets),))
    of_targets = torch.tensor(TARGETS, dtype=torch.float64)
    whole[len(OFFSETS) :].scatter_(1, targets[len(OFFSETS) :, None], of_targets[:, None])
    return whole, targets


def any_magnitude() -> list[bytes]:
    """Runs on a rank that shares the vocabulary; returns what it found, as bytes."""
    size = dist.get_world_size()
    whole, targets = _whole(300 * size)
    shifted = whole.clone()
    shifted.chunk(size, -1)[-1][:] -= 95.0  # of one rank's columns nothing can be represented
    of_logprob, of_entropy = torch.randn(2, len(targets))
    of_logprob[len(OFFSETS) :] *= 1e-12  # of a batch of many tokens, and a small weight
    how = {"targets": targets, "vocab_size": None, "temperature": 1.0, "ownership": "consume"}
    found = []
    for values in (whole, shifted):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for entropy in ("none", "metric", "grad"):
                arguments = {**how, "entropy": entropy}
                given = Case(values.to(dtype), arguments, "plain", of_logprob, of_entropy)
                found += within_bounds(given, entropy)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_of_any_magnitude_are_within_what_rounding_allows(megatron_ranks, ranks):
    first, *others = megatron_ranks(ranks, any_magnitude)
    assert all(other == first for other in others)


def alone_and_together(entropy: str) -> None:
    """A token's outputs and gradient, among others and as the only one."""
    whole, targets = _whole(300)
    weights = torch.randn(len(targets))

    def found(rows: list[int], workspace_bytes: int | None = None) -> list[torch.Tensor]:
        leaf = whole[rows].float().requires_grad_()
        stats = token_logprobs(
            logits=leaf, targets=targets[rows], entropy=entropy, workspace_bytes=workspace_bytes
        )
        total = (stats.logprob * weights[rows]).sum()
        if entropy == "grad":
            total = total + stats.entropy.sum()
        total.backward()
        return [each.detach() for each in (*stats, leaf.grad) if each is not None]

    everyone = list(range(len(targets)))
    together = found(everyone)
    for rows in ([row] for row in everyone):
        assert all(map(torch.equal, found(rows), (each[rows] for each in together)))
    backwards = everyone[::-1]
    for workspace_bytes in (1, 10_000):
        reversed_order = found(backwards, workspace_bytes)
        assert all(map(torch.equal, reversed_order, (each[backwards] for each in together)))


@pytest.mark.parametrize("entropy", ["none", "metric", "grad"])
def test_what_is_found_of_a_token_is_not_up_to_its_neighbours(entropy):
    alone_and_together(entropy)


@on_ranks(1)
def test_entropy_far_from_0_has_the_gradient_of_what_was_rounded() -> None:
    """Logits of float32 whose distance from 0 is rounded where they are shifted."""
    torch.manual_seed(0)
    for offset in (1e4, -3e3, 77.7):
        for temperature in (1.0, 0.7, torch.rand(6) + 0.5):
            arguments = {
                "targets": torch.randint(0, 40, (6, 3)),
                "vocab_size": 40,
                "temperature": temperature,
                "entropy": "grad",
            }
            whole = torch.randn(6, 40) + offset
            given = Case(whole, arguments, "plain", torch.zeros(6, 4), torch.ones(6))
            within_bounds(given, (offset, temperature), kind="several_targets")
    print(f"parts of their bounds that errors have: {USED}")
