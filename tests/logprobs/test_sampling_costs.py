"""Costs of a sampler's cut, results for odd logits, and what is refused."""

from __future__ import annotations

import pytest

V = 4096


def collectives() -> list[tuple[list[int], list[str]]]:
    """Runs on one of two ranks: bytes that each collective of the forward takes, and the
    backward's."""
    import torch
    import torch.distributed as dist

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.logprobs import Sampling
    from megatron_idempotent.proof.cpu.probes import watching_collectives

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
        forward: list[int] = []
        backward: list[str] = []

        def seen(_: str, arguments: tuple, forward=forward) -> None:
            forward.append(arguments[1].nbytes)

        with watching_collectives(seen):
            stats = token_logprobs(
                logits=logits,
                targets=torch.arange(8),
                tp_group=dist.group.WORLD,
                entropy="grad",
                sampling=sampling,
                workspace_bytes=1,
            )
        with watching_collectives(lambda name, _, seen=backward: seen.append(name)):
            (stats.logprob.sum() + stats.entropy.sum()).backward()
        found.append((forward, backward))
    return found


def test_one_collective_of_the_candidates_and_more_only_where_they_do_not_suffice(
    megatron_ranks,
):
    def sent(tokens: int, candidates: int) -> int:
        return tokens * (3 + candidates) * 4

    for found in megatron_ranks(2, collectives):
        assert found == [
            ([sent(8, 42), sent(2, 8 * 42), sent(2, 64 * 42), sent(2, V)], []),
            ([sent(8, 128), sent(2, 1024), sent(2, V)], []),
            ([8 * 4 * 4], []),
            ([sent(8, V)], []),
        ]


def memory() -> dict[str, float]:
    """Runs on a rank: most memory held beside the logits, in their size, for forward and
    backward."""
    import torch

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.logprobs import Sampling
    from megatron_idempotent.proof.cpu.probes import peak_bytes

    tokens, columns, found = 512, 16384, {}
    targets = torch.randint(0, columns, (tokens,))
    whole = torch.randn(tokens, columns) * 4
    for ownership in ("borrow", "consume"):
        given = [torch.ops.aten.alias(whole.clone().requires_grad_()) for _ in range(2)]

        def run(given=given, ownership=ownership) -> None:
            logits = given.pop()
            stats = token_logprobs(
                logits=logits,
                targets=targets,
                sampling=Sampling(top_k=20),
                ownership=ownership,
                workspace_bytes=1 << 18,
            )
            torch.autograd.grad(stats.logprob.sum(), logits)

        found[ownership] = peak_bytes(run, runs=2) / whole.nbytes
    return found


def test_memory_is_that_of_the_gradient_or_none(megatron_ranks):
    (found,) = megatron_ranks(1, memory)
    assert found["borrow"] <= 1.1
    assert found["consume"] <= 0.2, found


def odd() -> None:
    """Runs on one of two ranks: NaN stays in its row, and columns of -inf are not there."""
    import torch
    import torch.distributed as dist

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.logprobs import Sampling

    torch.manual_seed(0)
    rank = dist.get_rank()
    whole = torch.randn(4, 2 * V)
    whole[1, V + 7] = torch.nan
    whole[2, V:] = -torch.inf
    targets = torch.tensor([5, 6, 7, V + 9])
    for sampling in (
        Sampling(top_k=3),
        Sampling(top_p=0.3),
        Sampling(top_k=V + 5, target="-inf"),
        Sampling(keep=torch.tensor([[V + 7, V + 8, 5]] * 4)),
    ):
        logits = whole.chunk(2, -1)[rank].clone().requires_grad_()
        stats = token_logprobs(
            logits=logits,
            targets=targets,
            tp_group=dist.group.WORLD,
            entropy="grad",
            sampling=sampling,
        )
        torch.where(stats.logprob > -torch.inf, stats.logprob + stats.entropy, 0.0).sum().backward()
        for value in (stats.logprob, stats.entropy):
            assert value.isnan().tolist() == [False, True, False, False], (sampling, value)
        assert logits.grad[[0, 2, 3]].isfinite().all()
        if rank:
            assert not logits.grad[2].any()


def test_nan_stays_in_its_row_and_columns_of_minus_infinity_have_no_part(megatron_ranks):
    megatron_ranks(2, odd)


def impossible() -> None:
    """Runs on a rank: targets that are not kept, or that no sampler could have taken."""
    import torch

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.logprobs import Sampling

    torch.manual_seed(0)
    targets = torch.arange(3)
    for sampling in (
        None,
        Sampling(top_k=3),
        Sampling(top_k=V - 1),
        Sampling(top_p=0.5),
        Sampling(top_p=1 - 1e-9),
        Sampling(keep=torch.arange(9)[None].expand(3, -1).contiguous()),
    ):
        logits = torch.randn(3, V)
        logits[1:, :3] = torch.where(torch.eye(3)[1:] > 0, -torch.inf, 1.0)
        logits.requires_grad_()
        stats = token_logprobs(logits=logits, targets=targets, entropy="grad", sampling=sampling)
        assert stats.logprob.isfinite().tolist() == [True, False, False]
        assert stats.entropy.isfinite().all()
        stats.entropy.sum().backward()
        assert logits.grad.isfinite().all()
    logits = torch.randn(3, V).scatter_(1, targets[:, None], -9.0).requires_grad_()
    for cut in (
        {"top_k": 3},
        {"top_p": 0.5},
        {"keep": torch.arange(9)[None].expand(3, -1) + 3},
    ):
        sampling = Sampling(**cut, target="-inf")
        stats = token_logprobs(logits=logits, targets=targets, sampling=sampling)
        assert (stats.logprob == -torch.inf).all()
        ones = torch.ones_like(stats.logprob)
        (gradient,) = torch.autograd.grad(stats.logprob, logits, ones)
        assert not gradient.any()


def test_targets_of_probability_zero_leave_the_rest_finite_and_have_no_gradient(megatron_ranks):
    megatron_ranks(1, impossible)


def refused() -> None:
    """Runs on a rank: settings that cannot be meant."""
    import torch

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.logprobs import Sampling

    for arguments, text in [
        ({"top_k": -2}, "top_k=-2"),
        ({"top_k": 2.0}, "top_k=2.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"top_p": "0.9"}, "top_p='0.9'"),
        ({"target": "drop"}, "target='drop'"),
        ({"candidates": 0}, "candidates=0"),
        ({"keep": [1]}, "keep of list"),
        ({"keep": torch.ones(2)}, "keep of torch.float32"),
        ({"keep": torch.ones(2, dtype=torch.int64), "top_k": 3}, "keep, top_k=3"),
    ]:
        with pytest.raises(ValueError, match=text):
            Sampling(**arguments)
    for keep, target, text in [
        (torch.zeros(3, 1, dtype=torch.int64), "keep", r"keep of shape \(3, 1\)"),
        (torch.full((2, 1), 9), "keep", "id 9"),
        (torch.full((2, 1), -1), "-inf", "names no id"),
    ]:
        with pytest.raises(ValueError, match=text):
            token_logprobs(
                logits=torch.zeros(2, 9),
                targets=torch.zeros(2, dtype=torch.int64),
                sampling=Sampling(keep=keep, target=target),
            )
    logits = torch.randn(2, 9)
    arguments = {"logits": logits, "targets": torch.tensor([1, 2])}
    plain = token_logprobs(**arguments).logprob
    for sampling in (Sampling(), Sampling(top_k=9), Sampling(top_k=-1), Sampling(top_k=None)):
        assert torch.equal(token_logprobs(**arguments, sampling=sampling).logprob, plain)
    ids = torch.tensor([[1, 4], [2, -1]])
    for one, other in (
        (Sampling(top_k=None, top_p=0.6), Sampling(top_p=0.6)),
        (Sampling(top_k=None, keep=ids.int()), Sampling(keep=ids)),
    ):
        found, wanted = (
            token_logprobs(**arguments, sampling=each).logprob for each in (one, other)
        )
        assert torch.equal(found, wanted)
        assert not torch.equal(found, plain)
    empty = Sampling(keep=torch.zeros(2, 0, dtype=torch.int64))
    assert not token_logprobs(**arguments, sampling=empty).logprob.any()  # the target alone


def test_settings_that_cannot_be_meant_are_errors(megatron_ranks):
    megatron_ranks(1, refused)
