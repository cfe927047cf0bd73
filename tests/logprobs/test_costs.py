"""Costs of the op: collectives, memory, and other tensors that it may overwrite when told to."""

from __future__ import annotations

from typing import Any

import pytest

B, S, V = 2, 256, 4096


def collectives() -> list[tuple[list[str], list[str]]]:
    """Runs on one of two ranks: the collectives of forward and backward, for several block
    sizes."""
    import torch
    import torch.distributed as dist

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.proof.cpu.probes import watching_collectives

    found = []
    for workspace in (1, None):
        logits = torch.randn(8, 64, requires_grad=True)
        forward: list[str] = []
        backward: list[str] = []
        with watching_collectives(lambda name, _, seen=forward: seen.append(name)):
            stats = token_logprobs(
                logits=logits,
                targets=torch.arange(8),
                tp_group=dist.group.WORLD,
                entropy="grad",
                workspace_bytes=workspace,
            )
        with watching_collectives(lambda name, _, seen=backward: seen.append(name)):
            (stats.logprob.sum() + stats.entropy.sum()).backward()
        found.append((forward, backward))
    return found


def test_one_collective_forward_and_none_backward_however_many_blocks(megatron_ranks):
    for found in megatron_ranks(2, collectives):
        assert found == [(["_allgather_base_"], [])] * 2
    for found in megatron_ranks(1, collectives):
        assert found == [([], [])] * 2


def memory() -> dict[tuple[str, str, str], float]:
    """Runs on a rank: most memory held, in sizes of the logits, for forward and backward."""
    import torch

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.proof.cpu.probes import peak_bytes

    found = {}
    targets = torch.randint(0, V, (B, S))
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.randn(B, S, V).to(dtype)
        for ownership in ("borrow", "consume"):
            for entropy in ("none", "grad"):
                # Each run takes what it needs beside the logits, which are there before.
                given = [whole.clone().requires_grad_() for _ in range(3)]
                given = [torch.ops.aten.alias(each) for each in given]

                def run(given=given, entropy=entropy, ownership=ownership) -> None:
                    logits = given.pop()
                    stats = token_logprobs(
                        logits=logits,
                        targets=targets,
                        entropy=entropy,
                        ownership=ownership,
                        workspace_bytes=1 << 18,
                    )
                    total = stats.logprob.sum()
                    if entropy == "grad":
                        total = total + stats.entropy.sum()
                    torch.autograd.grad(total, logits)

                size = whole.nbytes
                found[str(dtype), ownership, entropy] = peak_bytes(run, runs=3) / size
    return found


def test_memory_is_that_of_the_gradient_or_none(megatron_ranks):
    (found,) = megatron_ranks(1, memory)
    for (_, ownership, _), most in found.items():
        assert most <= {"borrow": 1.1, "consume": 0.2}[ownership], found


def ownership() -> None:
    """Runs on a rank: the logits have another reader, and who may come after it."""
    import torch

    from megatron_idempotent import token_logprobs

    targets = torch.randint(0, V, (4,))
    leaf = torch.randn(4, V, requires_grad=True)

    def entropy(logits: Any) -> Any:
        return torch.special.entr(torch.softmax(logits, -1)).sum()

    def ours(logits: Any, how: str) -> Any:
        return token_logprobs(logits=logits, targets=targets, ownership=how).logprob.sum()

    def plain(logits: Any) -> Any:
        return torch.log_softmax(logits, -1).gather(-1, targets[:, None]).sum()

    (expected,) = torch.autograd.grad(entropy(leaf * 1) + plain(leaf * 1), leaf)
    for swapped in (False, True):
        logits = leaf * 1
        parts = [ours(logits, "borrow"), entropy(logits)]
        if swapped:
            logits = leaf * 1
            parts = [entropy(logits), ours(logits, "borrow")]
        (found,) = torch.autograd.grad(sum(parts), leaf)
        torch.testing.assert_close(found, expected)
    logits = leaf * 1
    saved_too = (logits * logits).sum()
    first = ours(logits, "consume")
    torch.autograd.grad(first, leaf, retain_graph=True)
    for output in (saved_too, first):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(output, leaf, retain_graph=True)
    with pytest.raises(ValueError, match="leaf logits"):
        ours(leaf, "consume")
    logits = leaf * 1
    again = ours(logits, "borrow")
    once, twice = (torch.autograd.grad(again, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, twice)
    with torch.no_grad():
        assert not ours(leaf, "consume").requires_grad
    gaps = torch.cat([leaf, leaf], -1)[:, :V]
    with pytest.warns(UserWarning, match="gaps"):
        (found,) = torch.autograd.grad(ours(gaps, "consume"), leaf)
    torch.testing.assert_close(found, once)


def test_logits_are_overwritten_where_that_was_asked_for_and_others_are_told(megatron_ranks):
    megatron_ranks(1, ownership)


def double() -> None:
    """Runs on a rank: finite differences in float64, with a mask and a temperature per token."""
    import torch

    from megatron_idempotent import token_logprobs

    torch.manual_seed(0)
    logits = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    temperature = torch.rand(3, 4) + 0.5
    mask = torch.rand(3, 4) < 0.7

    def run(logits: Any) -> tuple[Any, Any]:
        return token_logprobs(
            logits=logits,
            targets=torch.arange(12).view(3, 4) % 5,
            temperature=temperature,
            token_mask=mask,
            entropy="grad",
        )[:2]

    assert torch.autograd.gradcheck(run, (logits,))


def test_gradients_are_those_of_finite_differences(megatron_ranks):
    megatron_ranks(1, double)
