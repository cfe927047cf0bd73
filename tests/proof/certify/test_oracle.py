"""The oracle is the definition that it says, and the bounds are what roundings come to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_idempotent.proof.certify import layout, oracle
from megatron_idempotent.proof.certify.bench import Bench
from megatron_idempotent.proof.certify.tolerances import of_logprobs

HIDDEN, ROWS, POSITIONS = 8, 4, 6


@pytest.fixture(autouse=True)
def importable(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))


def truth_on(bench, rows, **how):
    """Runs on a rank: the truth of rows, and its gradient as one vector."""
    truth = oracle.truth_of(bench.parameters, [rows], **how)
    return truth, torch.cat([each.flatten() for each in truth.gradient.values()])


def bench_of(name):
    """Runs on a rank."""
    from megatron_idempotent.proof.certify.adapters import Megatron

    return Bench(Megatron(), layout(name))


def layer(**changed):
    """Weights of one layer: the router reads the first values, and experts multiply by 1 to 4."""
    torch.manual_seed(3)
    weights = {"mlp.router.weight": torch.eye(oracle.EXPERTS, HIDDEN).double()}
    for expert in range(oracle.EXPERTS):
        at = f"mlp.experts.local_experts.{expert}"
        weights[f"{at}.linear_fc1.weight"] = torch.eye(HIDDEN).double()
        weights[f"{at}.linear_fc2.weight"] = (1.0 + expert) * torch.eye(HIDDEN).double()
    return {**weights, **changed}


def inputs():
    x_BTH = torch.zeros(ROWS, POSITIONS, HIDDEN, dtype=torch.float64)
    x_BTH[..., : oracle.EXPERTS] = torch.tensor([0.0, 2.0, 1.0, -1.0])
    return x_BTH


def test_a_token_gets_the_two_experts_with_the_largest_logits_by_the_softmax_of_these():
    routed = []
    found_BTH = oracle.mixture(layer(), "mlp", inputs(), routed)
    share = torch.tensor([2.0, 1.0], dtype=torch.float64).softmax(0)
    factor = 2 * share[0] + 3 * share[1]
    torch.testing.assert_close(found_BTH, factor * torch.nn.functional.gelu(inputs()))
    assert [each.shape for each in routed] == [(ROWS, POSITIONS, oracle.EXPERTS)]


def test_a_router_that_roundings_could_decide_is_refused():
    near = inputs()
    near[1, 2, 0] = 0.95  # the third one, which is 1 from the second elsewhere
    with pytest.raises(RuntimeError, match=r"mlp is undecided: two logits differ by 0\.05, less"):
        oracle.mixture(layer(), "mlp", near, [])


def test_the_loss_of_a_microbatch_is_a_mean_times_its_positions():
    logits_BTE = torch.randn(
        ROWS, POSITIONS, oracle.EXPERTS, dtype=torch.float64, generator=torch.manual_seed(5)
    )

    def mean(logits_NE):
        chosen_NE = logits_NE >= logits_NE.topk(oracle.TOPK).values[:, -1:]
        f_E = chosen_NE.double().mean(0) / oracle.TOPK
        return oracle.COEFFICIENT * oracle.EXPERTS * (f_E * logits_NE.softmax(-1).mean(0)).sum()

    for rows in (1, 2, 4):
        for each_BTE in logits_BTE.split(rows):
            right = rows * POSITIONS * mean(each_BTE.flatten(0, 1))
            torch.testing.assert_close(oracle.balance(each_BTE), right)
    # Which rows share a microbatch makes a difference.
    halves, others = logits_BTE.split(2), logits_BTE[[0, 2, 1, 3]].split(2)
    assert sum(map(oracle.balance, halves)) != sum(map(oracle.balance, others))


def apart(name: str) -> tuple[float, float, float]:
    """Runs on a rank: by how much the truth of all rows differs from the mean of each row's own.

    Returns parts of the norm for a loss of sequences, and for one of positions; and the difference
    of the losses of sequences.
    """
    bench = bench_of(name)
    rows = bench.mixed(0, 1, 4) if bench.layout.packs else bench.rows(0, 1, 4)
    for number, mask_T in enumerate(rows["token_mask"]):
        mask_T[4 + 6 * number :] = 0
    rows["sample_mask"][1] = 0
    # Of one sequence alone both kinds of mean are the same.
    alone = [
        truth_on(bench, {key: value[row : row + 1] for key, value in rows.items()})
        for row in (0, 2, 3)
    ]
    mean = torch.stack([gradient for _, gradient in alone]).mean(0)
    (sequences, by_sequence), (tokens, by_token) = (
        truth_on(bench, rows, kind=kind) for kind in ("sequence", "token")
    )
    assert sequences.count == 3
    assert tokens.count == sum(each.count for each, _ in alone) == sequences.terms
    off = [float((each - mean).norm() / mean.norm()) for each in (by_sequence, by_token)]
    return *off, abs(sequences.loss - sum(each.loss for each, _ in alone) / 3)


@pytest.mark.parametrize("name", ["sequences", "packs-sequences"])
def test_the_truth_is_the_mean_of_what_each_sequence_has_alone(megatron_ranks, name):
    ((sequences, positions, loss),) = megatron_ranks(1, apart, name)
    # A step has some 400,000 roundings (tests/step/roundings.py). Independent ones of 2^-53 are
    # 7e-14 of the norm, with which both sides and their sums are off.
    assert sequences < 1e-12
    assert loss < 1e-12
    assert positions > 0.1


def weights(name: str, balance_mean: bool = False) -> tuple[float, float]:
    """Runs on a rank: what MoE's loss weighs in a step, in means over its microbatches."""
    bench = bench_of(name)
    rows = bench.rows(0, 1, 4)
    rows["sample_mask"][1] = 0
    rows["token_mask"][2, 10:] = 0
    gradients = []
    for coefficient in (1.0, 0.0):
        oracle.COEFFICIENT = coefficient
        how = {"kind": bench.layout.loss_kind, "balance_mean": balance_mean}
        gradients.append(truth_on(bench, rows, **how)[1])
    return float((gradients[0] - gradients[1]).norm()), float(rows["token_mask"].shape[1])


def test_experts_weigh_rows_by_sequences_as_they_weigh_positions_by_positions(megatron_ranks):
    ((of_sequences, length),) = megatron_ranks(1, weights, "moe-sequences")
    ((of_positions, _),) = megatron_ranks(1, weights, "moe")
    counted = 31 + 9 + 31  # the positions of the three rows that count
    assert of_sequences / of_positions == pytest.approx((4 / 3) / (4 * length / counted), rel=1e-9)
    ((mean, _),) = megatron_ranks(1, weights, "moe", True)
    assert of_positions / mean == pytest.approx(4 * length / counted, rel=1e-9)


def after_next() -> list[float]:
    """Runs on a rank: what the MTP layer's loss weighs in a step of whole rows, summed and not."""
    bench = bench_of("mtp")
    rows = bench.rows(0, 1, 4)
    name = "mtp.layers.0.eh_proj.weight"  # nothing else depends on it
    found = (truth_on(bench, rows, mtp_sum=summed)[0].gradient[name] for summed in (True, False))
    return [float(torch.linalg.vector_norm(each)) for each in found]


def test_before_0_17_the_token_after_the_next_counts_only_where_there_is_one(megatron_ranks):
    ((summed, mean),) = megatron_ranks(1, after_next)
    assert summed / mean == pytest.approx(30 / 31, rel=1e-9)


def borders() -> None:
    """Runs on a rank: what packs say of sequences, with padding, and where nothing counts."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_idempotent.proof.certify.batches import of_positions, of_sequences

    def tensor(*values):
        return torch.tensor([values], dtype=torch.float64)

    pack = {
        "input_ids": torch.zeros(1, 9, dtype=torch.int64),
        # Three sequences of 3, 2 and 2 tokens; the first has a place of padding, the last two
        # places of the pack are padding of the last.
        "loss_mask": tensor(1, 1, 0, 0, 0, 0, 1, 0, 0),
        "scale": tensor(1, 1, 1, 1, 1, 1, 3, 1, 1),
        "position_ids": torch.zeros(1, 9, dtype=torch.int64),
        "labels": torch.zeros(1, 9, dtype=torch.int64),
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=torch.tensor([0, 3, 5, 7], dtype=torch.int32),
            cu_seqlens_q_padded=torch.tensor([0, 4, 6, 9], dtype=torch.int32),
        ),
    }
    output = tensor(1, 2, 50, 50, 50, 50, 10, 50, 50)
    assert [float(each) for each in of_sequences(output, pack)] == [1.5 + 30, 2]
    assert [float(each) for each in of_positions(output, pack)] == [3 + 30, 3]


def test_a_pack_has_the_mean_of_each_of_its_sequences(megatron_ranks):
    megatron_ranks(1, borders)


def measured(name: str, rounding: float) -> dict[str, tuple[float, float]]:
    """Runs on a rank: by how much three roundings of each result move what a step has.

    Beside each stands the bound that certify has for it.
    """
    bench = bench_of(name)
    bench.parameters = {key: value.double() for key, value in bench.parameters.items()}
    # The product, the bias and the sum over ranks of a linear layer; others have fewer.
    size = 3**0.5 * rounding
    found = {"gradient": 0.0, "of sequences": 0.0, "logprobs": 0.0}
    for number in (2, 4):
        rows = bench.rows(0, number, number)
        # Of other lengths than each other, so that positions weigh differently.
        masked = {**rows, "token_mask": rows["token_mask"].clone()}
        for row, mask_T in enumerate(masked["token_mask"]):
            mask_T[2 + row * (len(mask_T) - 2) // number :] = 0
        for what, compute in {
            "gradient": lambda rows=rows: truth_on(bench, rows)[1],
            "of sequences": lambda rows=masked: truth_on(bench, rows, kind="sequence")[1],
            "logprobs": lambda rows=rows: oracle.negative_logprobs(
                bench.parameters, rows["input_ids"]
            ),
        }.items():
            found[what] = max(found[what], off(compute, size, samples=3))
    truth, _ = truth_on(bench, rows)
    bounds = {"gradient": bench.tolerance(truth), "logprobs": of_logprobs(bench.layout)}
    bench.layout = layout(f"{name}-sequences")
    bounds["of sequences"] = bench.tolerance(truth)
    return {what: (value, bounds[what]) for what, value in found.items()}


@pytest.mark.parametrize(
    ("name", "rounding"),
    [
        pytest.param("bf16", 2.0**-8, marks=pytest.mark.exhaustive),
        pytest.param("fp16", 2.0**-11, marks=pytest.mark.exhaustive),
        ("moe-bf16", 2.0**-8),
        pytest.param("ep1-mtp-fp16", 2.0**-11, marks=pytest.mark.exhaustive),
    ],
)
def test_the_bounds_are_twice_what_independent_roundings_come_to(megatron_ranks, name, rounding):
    (found,) = megatron_ranks(1, measured, name, rounding)
    for what, (value, bound) in found.items():
        assert bound / 2 < 2 * value <= bound, (what, found)


def factors_measured() -> tuple[list[float], float]:
    """Runs on a rank: the same of the factors of adapters, of each kind; and the bound."""
    from megatron_idempotent.proof.certify.low_rank import LowRank

    host, found = bench_of("bf16"), []
    for kind in ({"rank": 1}, {"rank": 16, "magnitudes": True}, {"rank": 4, "wide": True}):
        for still in ((), ("linear_in",), ("linear_out",)):
            adapted = LowRank(host, **kind)
            adapted.freeze(*still)
            rows = [adapted.rows(0, 4, 4)]

            def gradient(adapted=adapted, rows=rows):
                truth = adapted._truth(rows).gradient.values()
                return torch.cat([each.flatten() for each in truth])

            found.append(off(gradient, 3**0.5 * 2.0**-8, samples=3))
    return found, adapted.tolerance(adapted._truth(rows))


@pytest.mark.exhaustive
def test_the_bound_of_factors_is_twice_what_independent_roundings_come_to(megatron_ranks):
    ((found, bound),) = megatron_ranks(1, factors_measured, timeout_s=200)
    assert bound / 2 < 2 * max(found) <= bound, found


# How much rounding moves a gradient, if the roundings are independent of each other. Worst-case
# bounds, as `tests/step/roundings.py` has them, say nothing of bfloat16: where each rounding is the
# worst that it can be for all others, the gradient is lost. Roundings are not so: here each result
# of each operation, forward and backward, is off by independent signs of full size.

#: Operations whose results are copies of what there is, bit for bit.
_COPIES = ("view", "expand", "t.", "transpose", "permute", "slice", "select", "clone", "detach")
_COPIES += ("index.Tensor", "masked_fill", "roll", "gather", "zero", "new_", "full", "ones", "copy")
_COPIES += ("unsqueeze", "squeeze", "neg", "alias", "reshape", "_to_copy", "empty", "fill")
_COPIES += ("cat", "lift_fresh", "split")


class _Rounded(TorchDispatchMode):
    """Changes all results of floating point by `size` times their own size, either way."""

    def __init__(self, size: float, generator: torch.Generator) -> None:
        super().__init__()
        self._size, self._generator = size, generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        if name.startswith(_COPIES):
            return found
        if isinstance(found, tuple):
            return tuple(self._changed(each) for each in found)
        return self._changed(found)

    def _changed(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=self._generator).to(value) * 2 - 1
        return value + self._size * signs * value


def off(compute: Callable[[], Tensor], size: float, samples: int = 8) -> float:
    """Return the root mean square of what `compute`'s result is off by, as a part of its norm.

    Example: `off(gradient, 2.0**-8)` of bfloat16.
    """
    right = compute()
    generator = torch.Generator().manual_seed(0)
    squares = 0.0
    for _ in range(samples):
        with _Rounded(size, generator):
            found = compute()
        squares += float((found - right).square().sum())
    return float((squares / samples) ** 0.5 / right.norm())
