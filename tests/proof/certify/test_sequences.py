"""A loss that is a mean over sequences: its definition, and what an adapter can get wrong in it."""

from __future__ import annotations

import pytest

from megatron_idempotent.proof.certify import CHECKS, certify, layout, run


@pytest.fixture(autouse=True)
def importable(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))


def apart(name: str) -> tuple[float, float, float]:
    """Runs on a rank: by how much the truth of all rows differs from the mean of each row's own.

    Returns parts of the norm for a loss of sequences, and for one of positions; and the difference
    of the losses of sequences.
    """
    import torch

    from megatron_idempotent.proof.certify.adapters import Megatron
    from megatron_idempotent.proof.certify.bench import HEADS, LAYERS, Bench
    from megatron_idempotent.proof.certify.oracle import truth_of

    bench = Bench(Megatron(), layout(name))
    rows = bench.mixed(0, 1, 4) if bench.layout.packs else bench.rows(0, 1, 4)
    for number, mask_T in enumerate(rows["token_mask"]):
        mask_T[4 + 6 * number :] = 0
    rows["sample_mask"][1] = 0

    def truth(given, kind):
        return truth_of(bench.known, [given], layers=LAYERS, heads=HEADS, kind=kind)

    def flat(one):
        return torch.cat([each.flatten() for each in one.gradient.values()])

    # Of one sequence alone both kinds of mean are the same.
    alone = [
        truth({key: value[row : row + 1] for key, value in rows.items()}, "token")
        for row in (0, 2, 3)
    ]
    mean = torch.stack([flat(each) for each in alone]).mean(0)
    sequences = truth(rows, "sequence")
    assert sequences.count == 3
    assert truth(rows, "token").count == sum(each.count for each in alone) == sequences.terms
    off = [float((flat(truth(rows, kind)) - mean).norm() / mean.norm()) for kind in KINDS]
    return off[0], off[1], abs(sequences.loss - sum(each.loss for each in alone) / 3)


KINDS = ("sequence", "token")


@pytest.mark.parametrize("name", ["sequences", "packs-sequences"])
def test_the_truth_is_the_mean_of_what_each_sequence_has_alone(megatron_ranks, name):
    ((sequences, positions, loss),) = megatron_ranks(1, apart, name)
    # A step has some 400,000 roundings (docs/certify.md). Independent ones of 2^-53 are 7e-14 of
    # the norm, with which both sides and their sums are off.
    assert sequences < 1e-12
    assert loss < 1e-12
    assert positions > 0.1


def weights(name: str, balance_mean: bool = False) -> tuple[float, float]:
    """Runs on a rank: what MoE's loss weighs in a step, in means over its microbatches."""
    import torch

    from megatron_idempotent.proof.certify import experts
    from megatron_idempotent.proof.certify.adapters import Megatron
    from megatron_idempotent.proof.certify.bench import HEADS, LAYERS, Bench
    from megatron_idempotent.proof.certify.oracle import truth_of

    bench = Bench(Megatron(), layout(name))
    rows = bench.rows(0, 1, 4)
    rows["sample_mask"][1] = 0
    rows["token_mask"][2, 10:] = 0

    def gradient(coefficient):
        kept, experts.COEFFICIENT = experts.COEFFICIENT, coefficient
        try:
            found = truth_of(
                bench.known,
                [rows],
                layers=LAYERS,
                heads=HEADS,
                kind=bench.layout.loss_kind,
                balance_mean=balance_mean,
            )
        finally:
            experts.COEFFICIENT = kept
        return torch.cat([each.flatten() for each in found.gradient.values()])

    added = gradient(1.0) - gradient(0.0)
    return float(added.norm()), float(rows["token_mask"].shape[1])


def test_experts_weigh_rows_by_sequences_as_they_weigh_positions_by_positions(megatron_ranks):
    ((of_sequences, length),) = megatron_ranks(1, weights, "moe-sequences")
    ((of_positions, _),) = megatron_ranks(1, weights, "moe")
    counted = 31 + 9 + 31  # the positions of the three rows that count
    assert of_sequences / of_positions == pytest.approx((4 / 3) / (4 * length / counted), rel=1e-9)
    ((mean, _),) = megatron_ranks(1, weights, "moe", True)
    assert of_positions / mean == pytest.approx(4 * length / counted, rel=1e-9)


def after_next(summed: bool) -> float:
    """Runs on a rank: what the MTP layer's loss weighs in a step of whole rows."""
    import torch

    from megatron_idempotent.proof.certify import oracle
    from megatron_idempotent.proof.certify.adapters import Megatron
    from megatron_idempotent.proof.certify.bench import HEADS, LAYERS, Bench

    bench = Bench(Megatron(), layout("mtp"))
    rows = bench.rows(0, 1, 4)
    found = oracle.truth_of(bench.known, [rows], layers=LAYERS, heads=HEADS, mtp_sum=summed)
    name = "mtp.layers.0.eh_proj.weight"  # nothing else depends on it
    return float(torch.linalg.vector_norm(found.gradient[name]))


def test_before_0_17_the_token_after_the_next_counts_only_where_there_is_one(megatron_ranks):
    ((summed,), (mean,)) = (megatron_ranks(1, after_next, each) for each in (True, False))
    assert summed / mean == pytest.approx(30 / 31, rel=1e-9)


@pytest.mark.parametrize(
    ("bug", "where", "check", "said"),
    [
        ("MeanOverPositions", "dp2-sequences", "counts", "the gradient is off by "),
        ("CountsMaskedSequences", "dp2-sequences", "counts", "the gradient is 0.875 times"),
        ("WeighsExpertsByPositions", "dp2-moe-sequences", "whole-step", "the gradient is off by "),
    ],
)
def test_a_bug_in_a_mean_over_sequences_is_found(megatron_rank_pool, bug, where, check, said):
    fault, _ = run.outcome_of(
        megatron_rank_pool, f"planted_sequences:{bug}", CHECKS[check], layout(where)
    )
    assert fault.startswith(said), fault


@pytest.mark.exhaustive
@pytest.mark.parametrize("bug", ["MeanOverPositions", "CountsMaskedSequences"])
def test_sequences_of_one_length_that_all_count_do_not_tell_it(megatron_rank_pool, bug):
    for check in ("whole-step", "split-step"):
        fault, _ = run.outcome_of(
            megatron_rank_pool, f"planted_sequences:{bug}", CHECKS[check], layout("dp2-sequences")
        )
        assert not fault


@pytest.mark.exhaustive
def test_a_weight_of_experts_is_not_told_without_experts(megatron_rank_pool):
    fault, _ = run.outcome_of(
        megatron_rank_pool,
        "planted_sequences:WeighsExpertsByPositions",
        CHECKS["counts"],
        layout("dp2-sequences"),
    )
    assert not fault


def test_an_adapter_without_sequences_is_not_judged_on_them(megatron_rank_pool):
    results = certify(
        "planted_sequences:NoSequences", layouts=["dp2-sequences"], pool=megatron_rank_pool
    )
    assert {(each.verdict, each.fault) for each in results} == {
        ("not offered", "no sequences = True")
    }


def borders() -> None:
    """Runs on a rank: what packs say of sequences, with padding, and where nothing counts."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_idempotent.proof.certify.losses import of_positions, of_sequences

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
