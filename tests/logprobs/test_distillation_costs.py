"""Costs of K targets, of top-k and of divergences: collectives, memory, and who may overwrite."""

from __future__ import annotations

from typing import Any

import pytest

B, S, V = 2, 64, 4096


def _calls(logits: Any, teacher: Any, **common: Any) -> dict[str, Any]:
    """Return functions that compute something that may be differentiated."""
    import torch

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.logprobs import token_kl, vocab_topk

    free = {name: value for name, value in common.items() if name != "ownership"}
    topk = vocab_topk(logits=teacher, k=4, **free)
    of_k = {"teacher_ids": topk.ids, "teacher_logprobs": topk.logprob}

    def of_targets() -> Any:
        stats = token_logprobs(logits=logits, targets=topk.ids, entropy="grad", **common)
        return stats.logprob.sum() + stats.rest.sum() + stats.entropy.sum()

    def of_teacher(**teacher_has: Any) -> Any:
        return lambda: token_kl(logits=logits, **teacher_has, direction="mixed", **common).kl.sum()

    def of_topk() -> Any:
        found = vocab_topk(logits=logits, k=4, **free)
        return found.logprob.sum() + 0 * torch.zeros((), requires_grad=True)

    return {
        "targets": of_targets,
        "teacher's logits": of_teacher(teacher_logits=teacher),
        "teacher's tokens": of_teacher(**of_k),
        "top-k": of_topk,
    }


def collectives() -> dict[str, list[list[str]]]:
    """Runs on one of two ranks: those of forward and backward, for several block sizes."""
    import torch
    import torch.distributed as dist

    from megatron_idempotent.proof.cpu.probes import watching_collectives

    found: dict[str, list[list[str]]] = {}
    for workspace in (1, None):
        logits, teacher = torch.randn(8, 64, requires_grad=True), torch.randn(8, 64)
        common = {"tp_group": dist.group.WORLD, "workspace_bytes": workspace}
        for name, run in _calls(logits, teacher, **common).items():
            forward: list[str] = []
            backward: list[str] = []
            with watching_collectives(lambda name, _, seen=forward: seen.append(name)):
                total = run()
            with watching_collectives(lambda name, _, seen=backward: seen.append(name)):
                total.backward()
            found.setdefault(name, []).extend([forward, backward])
    return found


def test_one_collective_forward_and_none_backward_however_many_blocks(megatron_ranks):
    for ranks, forward in ((2, ["_allgather_base_"]), (1, [])):
        for found in megatron_ranks(ranks, collectives):
            assert len(found) == 4
            assert all(seen == [forward, [], forward, []] for seen in found.values()), found


def memory() -> dict[tuple[str, str, str], float]:
    """Runs on a rank: most memory held, in sizes of the logits, for forward and backward."""
    import torch

    from megatron_idempotent.proof.cpu.probes import peak_bytes

    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        whole, teacher = torch.randn(2, B, S, V).to(dtype)
        for ownership in ("borrow", "consume"):
            for name in ("targets", "teacher's logits", "teacher's tokens"):
                given = [whole.clone().requires_grad_() for _ in range(2)]
                given = [torch.ops.aten.alias(each) for each in given]
                common = {"ownership": ownership, "workspace_bytes": 1 << 16}

                def run(given=given, name=name, common=common, teacher=teacher) -> None:
                    logits = given.pop()
                    total = _calls(logits, teacher, **common)[name]()
                    torch.autograd.grad(total, logits)

                found[str(dtype), ownership, name] = peak_bytes(run, runs=2) / whole.nbytes
    return found


def test_memory_is_that_of_the_gradient_or_none(megatron_ranks):
    (found,) = megatron_ranks(1, memory)
    for (_, ownership, _), most in found.items():
        assert most <= {"borrow": 1.1, "consume": 0.2}[ownership], found


def ownership() -> None:
    """Runs on a rank: the student's logits are overwritten, the teacher's and borrowed ones never,
    and who has saved the former is told."""
    import torch

    from megatron_idempotent.logprobs import token_kl

    leaf, teacher = torch.randn(4, V, requires_grad=True), torch.randn(4, V)
    before = teacher.clone()

    def ours(logits: Any, how: str) -> Any:
        given = {"teacher_logits": teacher, "direction": "mixed", "ownership": how}
        return token_kl(logits=logits, **given).kl.sum()

    logits = leaf * 1
    borrowed = ours(logits, "borrow")
    once, twice = (torch.autograd.grad(borrowed, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, twice)
    assert torch.equal(logits, leaf)
    logits = leaf * 1
    saved_too = (logits * logits).sum()
    consumed = ours(logits, "consume")
    (found,) = torch.autograd.grad(consumed, leaf, retain_graph=True)
    assert torch.equal(found, once)
    assert torch.equal(teacher, before)
    for output in (saved_too, consumed):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(output, leaf, retain_graph=True)
    # The teacher's logits are kept for the backward, and may not change before it.
    total = ours(leaf * 1, "borrow")
    teacher.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    with torch.no_grad():
        assert not ours(leaf, "consume").requires_grad


def test_the_students_logits_are_overwritten_where_asked_and_the_teachers_never(megatron_ranks):
    megatron_ranks(1, ownership)
