"""Logits of any magnitude: exponentials of the logits, or of their distances from another one.

Which of the two a token gets is told from its own logits, so its bits are its own.
"""

from __future__ import annotations

import pytest

#: Of all logits; within some the sums of exponentials are numbers of float32, beyond not.
OFFSETS = [
    -1e4,
    -300.0,
    -97.0,
    -90.0,
    -70.0,
    -46.0,
    -30.0,
    0.0,
    40.0,
    70.0,
    80.0,
    84.0,
    87.0,
    90.0,
    1e4,
]
#: Of the target's logit alone.
TARGETS = [-1e4, -90.0, 30.0, 41.0, 61.0, 79.0, 81.0, 88.0, 90.0, 500.0]


def _whole(columns: int):
    """One row of each kind, and its targets."""
    import torch

    torch.manual_seed(1)
    offsets = torch.tensor(OFFSETS + [0.0] * len(TARGETS), dtype=torch.float64)
    whole = 2 * torch.randn(len(offsets), columns, dtype=torch.float64) + offsets[:, None]
    targets = torch.randint(0, columns, (len(offsets),))
    of_targets = torch.tensor(TARGETS, dtype=torch.float64)
    whole[len(OFFSETS) :].scatter_(1, targets[len(OFFSETS) :, None], of_targets[:, None])
    return whole, targets


def any_magnitude() -> list[bytes]:
    """Runs on a rank that shares the vocabulary; returns what it found, as bytes."""
    import torch
    import torch.distributed as dist
    from cases import Case, within_bounds

    size = dist.get_world_size()
    whole, targets = _whole(300 * size)
    shifted = whole.clone()
    shifted.chunk(size, -1)[-1][:] -= 95.0  # of one rank's columns nothing can be represented
    of_logprob, of_entropy = torch.randn(2, len(targets))
    of_logprob[len(OFFSETS) :] *= 1e-12  # of a batch of many tokens, and a small weight
    found = []
    for values in (whole, shifted):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for entropy in ("none", "metric", "grad"):
                arguments = {
                    "targets": targets,
                    "vocab_size": None,
                    "temperature": 1.0,
                    "entropy": entropy,
                    "ownership": "consume",
                }
                given = Case(values.to(dtype), arguments, "plain", of_logprob, of_entropy)
                found += within_bounds(given, entropy)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_of_any_magnitude_are_within_what_rounding_allows(megatron_ranks, ranks):
    first, *others = megatron_ranks(ranks, any_magnitude)
    assert all(other == first for other in others)


def alone_and_together(entropy: str) -> None:
    """Runs on a rank: a token's outputs and gradient, among others and as the only one."""
    import torch

    from megatron_idempotent import token_logprobs

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
def test_what_is_found_of_a_token_is_not_up_to_its_neighbours(megatron_ranks, entropy):
    megatron_ranks(1, alone_and_together, entropy)
