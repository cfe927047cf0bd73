"""The bounds of half precision are what independent roundings come to; bugs are far beyond them."""

from __future__ import annotations

import pytest

from megatron_idempotent.proof.certify import CHECKS, layout, run


@pytest.fixture(autouse=True)
def importable(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))


def measured(name: str, rounding: float) -> dict[str, float]:
    """Runs on a rank: by how much three roundings of each result move gradient and log-probs."""
    import torch
    from independent import off
    from torch import Tensor

    from megatron_idempotent.proof.certify.adapters import Megatron
    from megatron_idempotent.proof.certify.bench import HEADS, LAYERS, Bench
    from megatron_idempotent.proof.certify.oracle import negative_logprobs, truth_of

    bench = Bench(Megatron(), layout(name))
    known = {name: value.double() for name, value in bench.known.items()}

    def gradient() -> Tensor:
        truth = truth_of(known, [rows], layers=LAYERS, heads=HEADS)
        return torch.cat([each.flatten() for each in truth.gradient.values()])

    def of_sequences() -> Tensor:
        # Of other lengths than each other, so that positions weigh differently.
        masked = {**rows, "token_mask": rows["token_mask"].clone()}
        for row, mask_T in enumerate(masked["token_mask"]):
            mask_T[2 + row * (len(mask_T) - 2) // number :] = 0
        truth = truth_of(known, [masked], layers=LAYERS, heads=HEADS, kind="sequence")
        return torch.cat([each.flatten() for each in truth.gradient.values()])

    def logprobs() -> Tensor:
        return negative_logprobs(known, rows["input_ids"], LAYERS, HEADS)

    # The product, the bias and the sum over ranks of a linear layer; others have fewer.
    size = 3**0.5 * rounding
    found = {"gradient": 0.0, "of sequences": 0.0, "logprobs": 0.0}
    for number in (2, 4):
        rows = bench.rows(0, number, number)
        found["gradient"] = max(found["gradient"], off(gradient, size, samples=3))
        found["of sequences"] = max(found["of sequences"], off(of_sequences, size, samples=3))
        found["logprobs"] = max(found["logprobs"], off(logprobs, size, samples=3))
    return found


def bounds(name: str) -> tuple[float, float]:
    """Runs on a rank."""
    from megatron_idempotent.proof.certify.adapters import Megatron
    from megatron_idempotent.proof.certify.bench import HEADS, LAYERS, Bench
    from megatron_idempotent.proof.certify.oracle import truth_of

    bench = Bench(Megatron(), layout(name))
    truth = truth_of(bench.known, [bench.rows(0, 2, 2)], layers=LAYERS, heads=HEADS)
    return bench.tolerance(truth), bench.roundings


@pytest.mark.parametrize(
    ("name", "rounding"),
    [
        ("bf16", 2.0**-8),
        pytest.param("fp16", 2.0**-11, marks=pytest.mark.exhaustive),
        ("moe-bf16", 2.0**-8),
        pytest.param("ep1-mtp-fp16", 2.0**-11, marks=pytest.mark.exhaustive),
    ],
)
def test_the_bounds_are_twice_what_independent_roundings_come_to(megatron_ranks, name, rounding):
    (found,) = megatron_ranks(1, measured, name, rounding)
    ((gradient, logprobs),) = megatron_ranks(1, bounds, name)
    ((of_sequences, _),) = megatron_ranks(1, bounds, f"{name}-sequences")
    assert gradient / 2 < 2 * found["gradient"] <= gradient, found
    assert of_sequences / 2 < 2 * found["of sequences"] <= of_sequences, found
    assert logprobs / 2 < 2 * found["logprobs"] <= logprobs, found


@pytest.mark.parametrize(
    ("bug", "check", "said"),
    [
        ("planted:TwiceTheLoss", "whole-step", "times the right one"),
        ("planted:MeanOfMeans", "counts", "the gradient is off by "),
        ("planted_batches:ForgetsMainParameters", "resume", "save() and load() has changed"),
        (
            "planted_batches:UpdatesTheModelAlone",
            "whole-step",
            "its main parameter, rounded",
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.exhaustive)])
def test_a_bug_is_found_in_half_precision_too(megatron_rank_pool, bug, check, said, dtype):
    where = layout(f"dp2-{dtype}-distopt")
    fault, _ = run.outcome_of(megatron_rank_pool, bug, CHECKS[check], where)
    assert said in fault
