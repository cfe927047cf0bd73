"""Divergences from a teacher's logits, over a vocabulary that ranks share."""

from __future__ import annotations

from typing import Any

import pytest

CASES = 100


def against_float64(cases: int) -> tuple[list[bytes], dict[str, float]]:
    """Runs on a rank that shares the vocabulary with all others; what it found, as bytes."""
    import divergences
    from cases import USED

    found = [each for seed in range(cases) for each in divergences.within_bounds(seed)]
    found += [each for seed in range(cases // 2) for each in from_hidden(seed)]
    return found, USED


def from_hidden(seed: int) -> list[bytes]:
    """Runs on a rank: of hidden states, whole and in pieces."""
    import divergences
    import hidden_cases
    import torch
    import torch.distributed as dist

    from megatron_idempotent.logprobs import token_kl

    rank, size = dist.get_rank(), dist.get_world_size()
    given, teacher = divergences.case(seed, size, hidden_cases.widths(seed))
    given, hidden, weight = hidden_cases.with_hidden(given)
    given.of_logprob *= torch.rand(given.of_logprob.shape) < 0.5  # few are differentiated
    part = teacher.chunk(size, -1)[rank]
    if seed % 2 and teacher.dim() > 2:  # its rows lie in another order
        part = part.transpose(0, 1).contiguous().transpose(0, 1)

    def call(**form: Any) -> dict[str, Any]:
        return {"kl": token_kl(teacher_logits=part, **form, **given.arguments).kl}

    def backward(outputs: dict[str, Any]) -> None:
        divergences.differentiated(outputs["kl"], given.of_logprob)

    truth = divergences.truth(given, teacher)
    name = (seed, given.whole.dtype, teacher.dtype, given.arguments["direction"])
    return hidden_cases.within_bounds(call, backward, truth, hidden, weight, name)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_within_what_rounding_allows_and_alike_on_all_ranks(megatron_ranks, ranks):
    (first, used), *others = megatron_ranks(ranks, against_float64, CASES)
    print(f"parts of their bounds that errors have: {used}")
    assert all(other == first for other, _ in others)


def by_finite_differences() -> None:
    """Runs on a rank: both directions and their mixture, and the teacher's K tokens as well."""
    import torch

    from megatron_idempotent.logprobs import token_kl, vocab_topk

    torch.manual_seed(0)
    teacher = torch.randn(1, 3, 7, dtype=torch.float64)
    mask, temperature = torch.tensor([[True, False, True]]), torch.rand(1, 3) + 0.5
    common: dict[str, Any] = {"temperature": temperature, "token_mask": mask}
    logits = torch.randn(1, 3, 7, dtype=torch.float64, requires_grad=True)
    topk = vocab_topk(logits=teacher, k=3, **common)
    of_k = {"teacher_ids": topk.ids, "teacher_logprobs": topk.logprob}
    for direction in ("forward", "reverse", "mixed"):
        forms: list[dict[str, Any]] = [{"teacher_logits": teacher}]
        forms += [{**of_k, "tail": tail} for tail in ("ignore", "renormalize")]
        forms.append({**of_k, "teacher_rest": topk.rest})
        for form in forms:
            given = {**common, **form, "direction": direction, "mix": 0.3}

            def run(logits: Any, given: Any = given) -> Any:
                return token_kl(logits=logits, **given).kl

            assert torch.autograd.gradcheck(run, (logits,)), given


def infinite() -> None:
    """Runs on a rank: one gives probability where the other gives none."""
    import torch

    from megatron_idempotent.logprobs import token_kl

    torch.manual_seed(0)
    logits, teacher = torch.randn(2, 3, 40)
    logits[0, 3] = teacher[1, 5] = -torch.inf
    logits[2, 7] = teacher[2, 7] = -torch.inf
    for direction, expected in (("forward", 0), ("reverse", 1)):
        leaf = logits.clone().requires_grad_()
        kl = token_kl(logits=leaf, teacher_logits=teacher, direction=direction).kl
        assert (kl == torch.inf).tolist() == [number == expected for number in range(3)]
        torch.where(kl < torch.inf, kl, 0.0).sum().backward()
        assert leaf.grad.isfinite().all()
        assert leaf.grad.any(-1).tolist() == [number != expected for number in range(3)]
        # Also with a gradient of its own it does not move.
        leaf.grad = None
        kl = token_kl(logits=leaf, teacher_logits=teacher, direction=direction).kl
        kl.sum().backward()
        assert leaf.grad.isfinite().all()
        assert not leaf.grad[expected].any()
    same = torch.randn(4, 300)
    leaf = same.clone().requires_grad_()
    for direction in ("forward", "reverse", "mixed"):
        kl = token_kl(logits=leaf, teacher_logits=same, direction=direction).kl
        # Sums of the same bits, in the same order.
        assert (kl <= 300 * 2.0**-24).all()
        assert (kl >= 0).all()
    # One of many, so that all are differentiated: it alone does not move.
    many, others = torch.randn(2, 24, 40)
    many[5, 3] = others[7, 4] = -torch.inf
    for direction, expected in (("forward", [5]), ("reverse", [7]), ("mixed", [5, 7])):
        leaf = many.clone().requires_grad_()
        kl = token_kl(logits=leaf, teacher_logits=others, direction=direction).kl
        kl.sum().backward()
        assert leaf.grad.isfinite().all()
        assert (kl == torch.inf).nonzero()[:, 0].tolist() == expected
        assert (~leaf.grad.any(-1)).nonzero()[:, 0].tolist() == expected
    # Of a teacher's tokens too.
    ids = torch.arange(8).expand(24, -1)
    leaf = many.clone().requires_grad_()
    of_k = {"teacher_ids": ids, "teacher_logprobs": others.log_softmax(-1)[:, :8]}
    kl = token_kl(logits=leaf, **of_k).kl
    kl.sum().backward()
    assert (kl == torch.inf).nonzero()[:, 0].tolist() == [5]
    assert leaf.grad.isfinite().all()
    assert (~leaf.grad.any(-1)).nonzero()[:, 0].tolist() == [5]
    # The same distribution by other bits: rounding takes it not below 0.
    many = torch.randn(64, 300)
    for direction in ("forward", "reverse", "mixed"):
        kl = token_kl(logits=many, teacher_logits=many + 0.37, direction=direction).kl
        assert (kl >= 0).all()
    # NaN is not taken for a column without probability.
    broken = same.clone()
    broken[1, 4] = torch.nan
    for given in ((same, broken), (broken, same)):
        kl = token_kl(logits=given[0], teacher_logits=given[1]).kl
        assert kl.isnan().tolist() == [False, True, False, False]


def refused() -> None:
    """Runs on a rank: what each wrong call is told."""
    import torch

    from megatron_idempotent import TokenStats
    from megatron_idempotent.logprobs import token_kl, topk_kl, vocab_topk

    logits = torch.randn(2, 3, 9)
    ids = torch.arange(4).expand(2, 3, -1)
    logprobs = torch.full((2, 3, 4), -2.0)
    of_k = {"teacher_ids": ids, "teacher_logprobs": logprobs}
    of_logits = {"teacher_logits": logits}
    wrong: dict[str, dict[str, Any]] = {
        "no teacher": {},
        "teacher_ids: teacher_logits, or": {"teacher_ids": ids},
        "got teacher_logits, teacher_ids, teacher_logprobs": {**of_logits, **of_k},
        "teacher_logits of shape (3, 9)": {"teacher_logits": logits[0]},
        "teacher_logits of torch.int64": {"teacher_logits": logits.long()},
        "differentiate by teacher_logits": {"teacher_logits": logits.clone().requires_grad_()},
        "differentiate by teacher_logprobs": {
            **of_k,
            "teacher_logprobs": logprobs.clone().requires_grad_(),
        },
        "direction='sideways'": {**of_logits, "direction": "sideways"},
        "mix=1.5": {**of_logits, "mix": 1.5},
        "tail='cut'": {**of_k, "tail": "cut"},
        "token_mask of torch.int64": {**of_logits, "token_mask": ids[..., 0]},
        "temperature 0.0": {**of_logits, "temperature": 0.0},
        "vocab_size=10": {**of_logits, "vocab_size": 10},
        "leaf logits": {
            **of_logits,
            "logits": logits.clone().requires_grad_(),
            "ownership": "consume",
        },
        "teacher_logprobs of shape (2, 3, 3)": {**of_k, "teacher_logprobs": logprobs[..., 1:]},
        "teacher_rest of shape (2, 3, 4)": {**of_k, "teacher_rest": logprobs},
        "id 2 twice": {**of_k, "teacher_ids": ids.clamp(max=2)},
        "target 9, outside": {**of_k, "teacher_ids": ids + 6},
    }
    for text, arguments in wrong.items():
        with pytest.raises(ValueError) as told:  # noqa: PT011  the text is looked at
            token_kl(**{"logits": logits, **arguments})
        assert text in str(told.value), (text, told.value)
    for k in (0, 10, True, 2.0):
        with pytest.raises(ValueError, match=r"vocab_topk\(\) got k=.*: from 1 to 9"):
            vocab_topk(logits=logits, k=k)
    one = TokenStats(logits[..., 0], None, logits[..., 0])
    with pytest.raises(ValueError, match="one for each token"):
        topk_kl(one, logprobs)
    several = TokenStats(logprobs, None, logits[..., 0], logits[..., 0])
    with pytest.raises(ValueError, match=r"valid of shape \(2, 3\) for"):
        topk_kl(several, logprobs, valid=ids[..., 0] > 0)


def test_gradients_are_those_of_finite_differences(megatron_ranks):
    megatron_ranks(1, by_finite_differences)


def test_an_infinite_divergence_says_so_and_moves_nothing(megatron_ranks):
    megatron_ranks(1, infinite)


def test_errors_name_the_fact(megatron_ranks):
    megatron_ranks(1, refused)
