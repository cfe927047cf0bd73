"""Log-probs, entropies and gradients against float64, for whole and shared vocabularies."""

from __future__ import annotations

from typing import Any

import pytest

CASES = 100


def against_float64(cases: int) -> list[bytes]:
    """On a rank that shares the vocabulary with all others; what it found, as bytes."""
    import warnings

    import torch.distributed as dist
    from cases import case, truth

    from megatron_idempotent import token_logprobs

    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[bytes] = []
    for seed in range(cases):
        given = case(seed, size)
        leaf, logits = given.shard(rank, size)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*borrows")
            stats = token_logprobs(logits=logits, tp_group=dist.group.WORLD, **given.arguments)
        expected = truth(given)
        entropy = given.arguments["entropy"]
        assert (stats.entropy is None) == (entropy == "none")
        assert not stats.lse.requires_grad
        assert stats.entropy is None or stats.entropy.requires_grad == (entropy == "grad")

        def close(name: str, value: Any, *, expected=expected, given=given, seed=seed) -> None:
            error = (value.double() - getattr(expected, name)).abs()
            bound = getattr(expected, f"of_{name}")
            beyond = (error / bound)[~(error <= bound)].tolist()  # NaN too
            assert not beyond, f"{name} of case {seed}, {given.whole.dtype}: {beyond}"

        close("logprob", stats.logprob.detach())
        close("lse", stats.lse)
        if stats.entropy is not None:
            close("entropy", stats.entropy.detach())
        total = (stats.logprob * given.of_logprob).sum()
        if entropy == "grad":
            total = total + (stats.entropy * given.of_entropy).sum()
        total.backward()
        expected.gradient, expected.of_gradient = (
            each.chunk(size, -1)[rank] for each in (expected.gradient, expected.of_gradient)
        )
        close("gradient", leaf.grad)
        found += [each.detach().numpy().tobytes() for each in stats if each is not None]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_within_what_rounding_allows_and_alike_on_all_ranks(megatron_ranks, ranks):
    first, *others = megatron_ranks(ranks, against_float64, CASES)
    assert all(other == first for other in others)
