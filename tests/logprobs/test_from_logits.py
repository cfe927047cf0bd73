"""Log-probs, entropies and gradients against float64, for whole and shared vocabularies."""

from __future__ import annotations

import pytest

CASES = 100


def against_float64(cases: int) -> list[bytes]:
    """Runs on a rank that shares the vocabulary with all others; returns what it found, as
    bytes."""
    import torch.distributed as dist
    from cases import case, within_bounds

    size = dist.get_world_size()
    return [each for seed in range(cases) for each in within_bounds(case(seed, size), seed)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_within_what_rounding_allows_and_alike_on_all_ranks(megatron_ranks, ranks):
    first, *others = megatron_ranks(ranks, against_float64, CASES)
    assert all(other == first for other in others)


def confident(entropy: str) -> None:
    """Runs on a rank that shares the vocabulary: tokens that are certain up to as little as
    e⁻²⁵."""
    import torch
    import torch.distributed as dist
    from cases import additions

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.logprobs import Sampling

    rank, size = dist.get_rank(), dist.get_world_size()
    columns = 512 * size
    torch.manual_seed(0)
    whole = torch.randn(26, columns)
    targets = torch.randint(1, columns, (26,))
    whole[:, 0] = -torch.inf  # which top-k leaves out
    whole.scatter_(1, targets[:, None], whole.amax(1, keepdim=True) + torch.arange(26.0)[:, None])
    exact = whole.double().requires_grad_()
    logp = torch.log_softmax(exact, -1)
    total = logp.gather(1, targets[:, None]).sum()
    if entropy == "grad":
        total = total - (logp.exp() * logp.clamp(min=-1e30)).sum()
    total.backward()
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
        total = stats.logprob.sum()
        if entropy == "grad":
            total = total + stats.entropy.sum()
        total.backward()
        error = (leaf.grad - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert (error <= bound).all(), (sampling, (error / bound).tolist())


@pytest.mark.parametrize("entropy", ["none", "grad"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_tokens_that_are_all_but_certain_are_exact(megatron_ranks, ranks, entropy):
    megatron_ranks(ranks, confident, entropy)
