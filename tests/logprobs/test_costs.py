"""Costs of each call: collectives, memory, products, and other tensors that it may overwrite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import summed
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_idempotent import token_logprobs
from megatron_idempotent.logprobs import Sampling, topk_kl, vocab_topk
from megatron_idempotent.logprobs.rows import blocks_of
from megatron_idempotent.proof.cpu.probes import peak_bytes, watching_collectives

pytestmark = pytest.mark.full

V = 4096


def calls(logits: Any, teacher: Any, **common: Any) -> dict[str, Callable[[], Any]]:
    """Functions that compute something that may be differentiated."""
    free = {name: value for name, value in common.items() if name != "ownership"}
    topk = vocab_topk(logits=teacher, k=4, **free)

    def of_targets(targets: Any, entropy: str) -> Any:
        stats = token_logprobs(logits=logits, targets=targets, entropy=entropy, **common)
        return summed(stats) + (0 if stats.rest is None else stats.rest.sum())

    def of_teacher() -> Any:
        stats = token_logprobs(logits=logits, targets=topk.ids, **common)
        return topk_kl(stats, topk.logprob, direction="mixed").kl.sum()

    def of_topk() -> Any:
        found = vocab_topk(logits=logits, k=4, **free)
        return found.logprob.sum() + 0 * torch.zeros((), requires_grad=True)

    return {
        "one target": lambda: of_targets(topk.ids[..., 0], "none"),
        "with entropy": lambda: of_targets(topk.ids[..., 0], "grad"),
        "targets": lambda: of_targets(topk.ids, "grad"),
        "teacher's tokens": of_teacher,
        "top-k": of_topk,
    }


NAMES = ("one target", "with entropy", "targets", "teacher's tokens")


def watched(run: Callable[[], Any]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Collectives of a call's forward and backward: names, and bytes that this rank sends."""
    found: tuple[list[Any], list[Any]] = ([], [])

    def into(seen: list[Any]) -> Any:
        return watching_collectives(lambda name, given: seen.append((name, given[1].nbytes)))

    with into(found[0]):
        total = run()
    with into(found[1]):
        total.backward()
    return found


def collectives() -> dict[str, list[Any]]:
    """Runs on one of two ranks: those of each call, for several block sizes."""
    found: dict[str, list[Any]] = {}
    for workspace in (1, None):
        logits, teacher = torch.randn(8, 64, requires_grad=True), torch.randn(8, 64)
        common = {"tp_group": dist.group.WORLD, "workspace_bytes": workspace}
        for name, run in calls(logits, teacher, **common).items():
            found.setdefault(name, []).append(watched(run))
    return found


def test_one_collective_forward_and_none_backward_however_many_blocks(megatron_ranks):
    for ranks, forward in ((2, ["_allgather_base_"]), (1, [])):
        for found in megatron_ranks(ranks, collectives):
            assert len(found) == 5
            for seen in found.values():
                assert [[name for name, _ in there] for there, _ in seen] == [forward] * 2, found
                assert [back for _, back in seen] == [[], []], found


def of_a_sampler() -> list[tuple[list[int], list[Any]]]:
    """Runs on one of two ranks: bytes that each collective of the forward takes, and the
    backward's."""
    torch.manual_seed(0)
    whole = torch.randn(8, 2 * V) * 4
    whole[3:5] = 0.0  # all alike: more than any number of candidates
    found = []
    for sampling in (
        Sampling(top_k=10),
        Sampling(top_p=0.5),
        Sampling(keep=torch.arange(8)[:, None].expand(8, 5).contiguous()),
        Sampling(top_k=10, candidates=4096),
    ):
        logits = whole[:, dist.get_rank() * V :][:, :V].clone().requires_grad_()

        def run(sampling: Any = sampling, logits: Any = logits) -> Any:
            stats = token_logprobs(
                logits=logits,
                targets=torch.arange(8),
                tp_group=dist.group.WORLD,
                entropy="grad",
                sampling=sampling,
                workspace_bytes=1,
            )
            return summed(stats)

        forward, backward = watched(run)
        found.append(([nbytes for _, nbytes in forward], backward))
    return found


def test_a_samplers_candidates_are_sent_and_more_only_where_they_do_not_suffice(megatron_ranks):
    def sent(tokens: int, candidates: int) -> int:
        return tokens * (3 + candidates) * 4

    for found in megatron_ranks(2, of_a_sampler):
        assert found == [
            ([sent(8, 42), sent(2, 8 * 42), sent(2, 64 * 42), sent(2, V)], []),
            ([sent(8, 128), sent(2, 1024), sent(2, V)], []),
            ([8 * 4 * 4], []),
            ([sent(8, V)], []),
        ]


@pytest.mark.parametrize(
    ("ownership", "dtype", "most"), [("borrow", "float32", 1.1), ("consume", "bfloat16", 0.2)]
)
@pytest.mark.parametrize("name", [*NAMES, "sampler"])
def test_memory_is_that_of_the_gradient_or_none(name, ownership, dtype, most):
    """Most memory held beside the logits, in their size, for forward and backward."""
    shape = (128, 4 * V) if name == "sampler" else (2, 64, V)
    whole, teacher = (torch.randn(2, *shape) * 4).to(getattr(torch, dtype))
    # Each run takes what it needs beside the logits, which are there before.
    given = [torch.ops.aten.alias(whole.clone().requires_grad_())]
    how: dict[str, Any] = {"ownership": ownership, "workspace_bytes": whole.nbytes // 32}

    def run() -> None:
        logits = given.pop()
        if name == "sampler":
            how.update(targets=torch.arange(len(whole)), sampling=Sampling(top_k=20))
            total = token_logprobs(logits=logits, **how).logprob.sum()
        else:
            total = calls(logits, teacher, **how)[name]()
        torch.autograd.grad(total, logits)

    assert peak_bytes(run, runs=1) <= most * whole.nbytes


@pytest.mark.parametrize("name", ["with entropy", "teacher's tokens"])
def test_logits_are_overwritten_where_that_was_asked_for_and_others_are_told(name):
    leaf, teacher = torch.randn(4, V, requires_grad=True), torch.randn(4, V)
    before = teacher.clone()

    def ours(logits: Any, how: str) -> Any:
        return calls(logits, teacher, ownership=how)[name]()

    def entropy(logits: Any) -> Any:
        return torch.special.entr(torch.softmax(logits, -1)).sum()

    logits = leaf * 1
    borrowed = ours(logits, "borrow")
    once, twice = (torch.autograd.grad(borrowed, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, twice)
    assert torch.equal(logits, leaf)
    (of_entropy,) = torch.autograd.grad(entropy(leaf * 1), leaf)
    logits, swapped = leaf * 1, leaf * 1
    for parts in (
        [ours(logits, "borrow"), entropy(logits)],
        [entropy(swapped), ours(swapped, "borrow")],
    ):
        (found,) = torch.autograd.grad(sum(parts), leaf)
        torch.testing.assert_close(found, once + of_entropy)

    logits = leaf * 1
    saved_too = (logits * logits).sum()
    consumed = ours(logits, "consume")
    (found,) = torch.autograd.grad(consumed, leaf, retain_graph=True)
    assert torch.equal(found, once)
    assert torch.equal(teacher, before)
    for output in (saved_too, consumed):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(output, leaf, retain_graph=True)
    with pytest.raises(ValueError, match="leaf logits"):
        ours(leaf, "consume")
    with torch.no_grad():
        assert not ours(leaf, "consume").requires_grad
    gaps = torch.cat([leaf, leaf], -1)[:, :V]
    with pytest.warns(UserWarning, match="gaps"):
        (found,) = torch.autograd.grad(ours(gaps, "consume"), leaf)
    torch.testing.assert_close(found, once)


def test_from_hidden_states_only_what_is_asked_for_is_multiplied_and_held():

    class Products(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            if func._opname in ("mm", "addmm_", "addmm"):
                self.elements += result.numel()
            return result

    tokens, features, columns = 512, 16, V
    targets = torch.arange(tokens)
    mask = torch.arange(tokens) % 4 == 0

    def run(of_hidden: bool, of_weight: bool, share: float = 1.0, **more: Any) -> int:
        hidden = torch.randn(tokens, features, requires_grad=of_hidden)
        weight = torch.randn(columns, features, requires_grad=of_weight)
        with Products() as products:
            stats = token_logprobs(hidden=hidden, weight=weight, targets=targets, **more)
            if of_hidden or of_weight:
                stats.logprob[: int(share * tokens)].sum().backward()
        assert (hidden.grad is not None, weight.grad is not None) == (of_hidden, of_weight)
        return products.elements

    parts = 1  # whose logits take 8 MB
    forward, of_weight = tokens * columns, columns * features
    assert run(False, False) == forward
    assert run(True, False) == 2 * forward + parts * tokens * features
    assert run(False, True) == 2 * forward + of_weight
    # A quarter has a gradient: half of the work is in the backward's products, but for the parts.
    backward = run(True, True) - forward
    assert run(True, True, share=0.25) - forward <= 0.4 * backward + of_weight
    assert run(True, True, token_mask=mask) <= run(True, True) / 4 + of_weight
    hidden, weight = torch.randn(tokens, features), torch.randn(columns, features)

    def step() -> None:
        leaf = hidden.clone().requires_grad_()
        stats = token_logprobs(
            hidden=leaf, weight=weight, targets=targets, workspace_bytes=1 << 20, entropy="grad"
        )
        summed(stats).backward()

    assert peak_bytes(step) <= 0.4 * tokens * columns * 4  # of logits and their gradient: 0.2


def test_rows_that_follow_each_other_are_not_copied():
    panels = [torch.zeros(64, 1)]
    responses = torch.arange(64) % 16 >= 6
    assert all(isinstance(block.rows, slice) for block in blocks_of(panels, responses, 8))
    every_other = torch.arange(64) % 2 == 0
    assert not any(isinstance(block.rows, slice) for block in blocks_of(panels, every_other, 16))
    rows = [block.rows for block in blocks_of(panels, None, 48)]
    assert rows == [slice(0, 48), slice(48, 64)]
