"""Log-probs of K targets for each token, and of the rest, out of one reading of the logits."""

from __future__ import annotations

from typing import Any

import pytest

CASES = 80


def against_float64(cases: int) -> list[bytes]:
    """Runs on a rank that shares the vocabulary with all others; what it found, as bytes."""
    import several_targets
    import torch.distributed as dist

    size = dist.get_world_size()
    found = [
        each
        for seed in range(cases)
        for each in several_targets.within_bounds(several_targets.case(seed, size), seed)
    ]
    return [*found, *from_hidden(cases // 4)]


def from_hidden(cases: int) -> list[bytes]:
    """Runs on a rank: in float64, where only the order of sums tells it from the logits' way."""
    import several_targets
    import torch
    import torch.distributed as dist

    from megatron_idempotent import token_logprobs

    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for seed in range(cases):
        given = several_targets.case(seed, size)
        arguments = {**given.arguments, "ownership": "borrow"}
        columns, shape = given.whole.shape[-1], given.whole.shape[:-1]
        hidden = torch.randn(*shape, 8, dtype=torch.float64)
        weight = torch.randn(columns, 8, dtype=torch.float64)
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
        expected = token_logprobs(logits=leaves[0] @ leaves[1].t(), **arguments)
        several_targets.total(expected._asdict(), given).backward()
        for layout in ("replicated", "sequence_parallel"):
            pieces = layout == "sequence_parallel"
            if pieces and (not shape or shape[0] % size):
                continue
            part = (hidden.chunk(size)[rank] if pieces else hidden).clone().requires_grad_()
            matrix = weight.chunk(size)[rank].clone().requires_grad_()
            stats = token_logprobs(
                hidden=part,
                weight=matrix,
                tp_group=dist.group.WORLD,
                hidden_layout=layout,
                **arguments,
            )
            several_targets.total(stats._asdict(), given).backward()
            of_hidden = leaves[0].grad.chunk(size)[rank] if pieces else leaves[0].grad
            wanted = [*expected, of_hidden, leaves[1].grad.chunk(size)[rank]]
            for value, exact in zip([*stats, part.grad, matrix.grad], wanted, strict=True):
                if value is not None:
                    torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-12)
            found += [each.detach().numpy().tobytes() for each in stats if each is not None]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_within_what_rounding_allows_and_alike_on_all_ranks(megatron_ranks, ranks):
    first, *others = megatron_ranks(ranks, against_float64, CASES)
    assert all(other == first for other in others)


def one_of_several() -> None:
    """Runs on a rank: one id in [..., 1] is that id, ids that are ignored are none, and all of a
    vocabulary leave no rest."""
    import torch

    from megatron_idempotent import token_logprobs

    torch.manual_seed(0)
    logits = torch.randn(3, 4, 50, requires_grad=True)
    targets = torch.randint(0, 50, (3, 4))
    one = token_logprobs(logits=logits, targets=targets, entropy="grad")
    assert one.rest is None
    narrow = token_logprobs(logits=logits, targets=targets.int(), entropy="grad")
    assert all(map(torch.equal, narrow[:3], one[:3]))
    several = token_logprobs(logits=logits, targets=targets[..., None].int(), entropy="grad")
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(several.logprob.squeeze(-1), one.logprob, **close)
    torch.testing.assert_close(several.entropy, one.entropy, **close)
    torch.testing.assert_close(several.rest.exp(), 1 - one.logprob.exp(), **close)
    found, wanted = (
        torch.autograd.grad((stats.logprob.sum() + stats.entropy.sum()), logits)[0]
        for stats in (several, one)
    )
    torch.testing.assert_close(found, wanted, **close)
    every = torch.arange(50).expand(3, 4, -1)
    stats = token_logprobs(logits=logits, targets=every)
    torch.testing.assert_close(stats.logprob, logits.log_softmax(-1), **close)
    assert (stats.rest == -torch.inf).all()
    (found,) = torch.autograd.grad(
        stats.logprob.exp().square().sum() + 0 * stats.rest.sum(), logits
    )
    (wanted,) = torch.autograd.grad(logits.softmax(-1).square().sum(), logits)
    torch.testing.assert_close(found, wanted, **close)
    # A token of which every id is ignored is not computed.
    none = torch.where(torch.arange(3)[:, None, None] == 1, -100, every[..., :5])
    stats = token_logprobs(logits=logits, targets=none, entropy="metric")
    assert not stats.logprob[1].any()
    assert not stats.entropy[1].any()
    assert not stats.rest[1].any()
    assert stats.entropy[::2].all()


def by_finite_differences() -> None:
    """Runs on a rank: the gradients of log-probs, rest and entropy together."""
    import torch

    from megatron_idempotent import token_logprobs

    torch.manual_seed(0)
    logits = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 7, (3, 4, 3))
    targets[0, 0] = torch.tensor([5, 5, -100])
    mask, temperature = torch.rand(3, 4) < 0.7, torch.rand(3, 4) + 0.5

    def run(logits: Any) -> tuple[Any, ...]:
        stats = token_logprobs(
            logits=logits,
            targets=targets,
            temperature=temperature,
            token_mask=mask,
            entropy="grad",
        )
        return stats.logprob, stats.entropy, stats.rest

    assert torch.autograd.gradcheck(run, (logits,))


def refused() -> None:
    """Runs on a rank: what K targets cannot be, and what computes one target only."""
    import torch

    from megatron_idempotent import Sampling, token_logprobs

    logits = torch.zeros(2, 3, 9)
    right = torch.zeros(2, 3, 4, dtype=torch.int64)
    wrong: dict[str, dict[str, Any]] = {
        "or (2, 3, 'K') for K of each token": {"targets": right[0]},
        "at least one each": {"targets": right[..., :0]},
        "target 9, outside": {"targets": right + torch.tensor([0, 0, 0, 9])},
        "target -1, outside": {"targets": right + torch.tensor([0, 0, 0, -1])},
        "triton=True, which knows one": {"targets": right, "triton": True},
        "compiled=True, which knows one": {"targets": right, "compiled": True},
        "sampling=Sampling(top_k=3": {"targets": right, "sampling": Sampling(top_k=3)},
    }
    for text, arguments in wrong.items():
        with pytest.raises(ValueError) as told:  # noqa: PT011  the text is looked at
            token_logprobs(logits=logits, **arguments)
        assert text in str(told.value), told.value


def test_one_of_several_is_that_one_and_all_leave_no_rest(megatron_ranks):
    megatron_ranks(1, one_of_several)


def test_gradients_are_those_of_finite_differences(megatron_ranks):
    megatron_ranks(1, by_finite_differences)


def test_errors_name_the_fact(megatron_ranks):
    megatron_ranks(1, refused)
