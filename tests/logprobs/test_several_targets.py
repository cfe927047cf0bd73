"""Log-probs of K targets for each token, and of the rest, out of one reading of the logits."""

from __future__ import annotations

from typing import Any

import pytest

CASES = 80


def against_float64(cases: int) -> tuple[list[bytes], dict[str, float]]:
    """Runs on a rank that shares the vocabulary with all others; what it found, as bytes."""
    import several_targets
    import torch.distributed as dist
    from cases import USED

    size = dist.get_world_size()
    found = [
        each
        for seed in range(cases)
        for each in several_targets.within_bounds(several_targets.case(seed, size), seed)
    ]
    found += [each for seed in range(cases // 2) for each in from_hidden(seed)]
    return found, USED


def from_hidden(seed: int) -> list[bytes]:
    """Runs on a rank: of hidden states, whole and in pieces."""
    import hidden_cases
    import several_targets
    import torch.distributed as dist

    from megatron_idempotent import token_logprobs

    given = several_targets.case(seed, dist.get_world_size(), hidden_cases.widths(seed))
    given, hidden, weight = hidden_cases.with_hidden(given)

    def call(**form: Any) -> dict[str, Any]:
        return token_logprobs(**form, **given.arguments)._asdict()

    def backward(outputs: dict[str, Any]) -> None:
        several_targets.total(outputs, given).backward()

    truth = several_targets.truth(given)
    name = (seed, given.whole.dtype)
    return hidden_cases.within_bounds(call, backward, truth, hidden, weight, name)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_within_what_rounding_allows_and_alike_on_all_ranks(megatron_ranks, ranks):
    (first, used), *others = megatron_ranks(ranks, against_float64, CASES)
    print(f"parts of their bounds that errors have: {used}")
    assert all(other == first for other, _ in others)


def one_of_several() -> None:
    """Runs on a rank: one id in [..., 1] is that id, ids that are ignored are none, and all of a
    vocabulary leave no rest."""
    import cases
    import several_targets
    import torch

    from megatron_idempotent import token_logprobs

    torch.manual_seed(0)
    columns, u = 50, cases.U[torch.float32]
    logits = torch.randn(3, 4, columns, requires_grad=True)
    targets = torch.randint(0, columns, (3, 4))
    how = {"vocab_size": columns, "temperature": 1.0, "entropy": "grad"}

    def given(targets: Any, of_logprob: Any) -> Any:
        arguments = {"targets": targets, **how}
        ones = torch.ones(3, 4)
        return cases.Case(logits.detach(), arguments, "plain", of_logprob, ones)

    one = token_logprobs(logits=logits, targets=targets, **how)
    assert one.rest is None
    narrow = token_logprobs(logits=logits, targets=targets.int(), **how)
    assert all(map(torch.equal, narrow[:3], one[:3]))
    several = token_logprobs(logits=logits, targets=targets[..., None].int(), **how)
    # Each is off by so much from float64, so from each other by no more than both.
    of_one = cases.truth(given(targets, torch.ones(3, 4)))
    only_logprob = torch.tensor([1.0, 0.0]).expand(3, 4, 2)
    _, bounds = several_targets.truth(given(targets[..., None], only_logprob))
    left = 1 - one.logprob.exp()
    found, wanted = (
        torch.autograd.grad((stats.logprob.sum() + stats.entropy.sum()), logits)[0]
        for stats in (several, one)
    )
    p, rest = of_one.logprob.exp(), several.rest.double().exp()
    of_left = p * of_one.of_logprob + rest * bounds["rest"] + 2 * u
    for what, value, expected, bound in (
        ("logprob", several.logprob[..., 0], one.logprob, of_one.of_logprob),
        ("entropy", several.entropy, one.entropy, of_one.of_entropy),
        ("gradient", found, wanted, of_one.of_gradient),
        ("what is left", rest, left, of_left),
    ):
        both = bound + bounds[what].view(bound.shape) if what in bounds else bound
        cases.close(what, value, expected.double(), both, "one target")
    every = torch.arange(columns).expand(3, 4, -1)
    of_all = given(every, torch.randn(3, 4, columns + 1))
    several_targets.within_bounds(of_all, "all of a vocabulary")
    stats = token_logprobs(logits=logits, targets=every, **how)
    assert (stats.rest == -torch.inf).all()
    total = (stats.logprob * of_all.of_logprob[..., :-1]).sum()
    first, second = (
        torch.autograd.grad(each, logits, retain_graph=True)[0]
        for each in (total, total + stats.rest.sum())  # what is -inf does not move
    )
    assert torch.equal(first, second)
    # A token of which every id is ignored is not computed.
    none = torch.where(torch.arange(3)[:, None, None] == 1, -100, every[..., :5])
    stats = token_logprobs(logits=logits, targets=none, entropy="metric")
    assert not stats.logprob[1].any()
    assert not stats.entropy[1].any()
    assert not stats.rest[1].any()
    assert stats.entropy[::2].all()


def far_from_0() -> dict[str, float]:
    """Runs on a rank: logits of float32 whose distance from 0 is rounded where they are shifted."""
    import several_targets
    import torch
    from cases import USED, Case

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
            several_targets.within_bounds(given, (offset, temperature))
    return USED


def test_entropy_far_from_0_has_the_gradient_of_what_was_rounded(megatron_ranks):
    (used,) = megatron_ranks(1, far_from_0)
    print(f"parts of their bounds that errors have: {used}")


def few_with_a_gradient() -> None:
    """Runs on a rank: two of 40 tokens, of which a gradient reaches the second target alone."""
    import torch

    from megatron_idempotent import token_logprobs

    live, generator = [3, 17], torch.Generator().manual_seed(0)
    logits = torch.randn(1, 40, 24, generator=generator)
    weight = torch.randn(24, 8, generator=generator)
    hidden = torch.randn(1, 40, 8, generator=generator)
    ids = torch.stack([torch.arange(40) % 24, (torch.arange(40) + 5) % 24], -1)[None]

    def gradient(leaf: Any, rows: list[int], **form: Any) -> Any:
        stats = token_logprobs(targets=ids[:, rows], **form)
        own = [rows.index(each) for each in live]
        return torch.autograd.grad(stats.logprob[0, own, 1].sum(), leaf)[0]

    every = list(range(40))
    whole = gradient(logits.requires_grad_(), every, logits=logits)
    few = logits.detach()[:, live].requires_grad_()
    assert torch.equal(whole[:, live], gradient(few, live, logits=few))
    assert (whole != 0).any(-1)[0].nonzero().flatten().tolist() == live
    form = {"hidden": hidden.requires_grad_(), "weight": weight}
    found = gradient(hidden, every, **form)
    assert (found != 0).any(-1)[0].nonzero().flatten().tolist() == live


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

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.logprobs import Sampling

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


def test_a_token_has_a_gradient_if_any_of_its_targets_has(megatron_ranks):
    megatron_ranks(1, few_with_a_gradient)


def test_gradients_are_those_of_finite_differences(megatron_ranks):
    megatron_ranks(1, by_finite_differences)


def test_errors_name_the_fact(megatron_ranks):
    megatron_ranks(1, refused)
