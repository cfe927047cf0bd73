"""A batch returns outputs per sample and sums at once, on the ranks that have the loss."""

from __future__ import annotations

from typing import Any

import pytest


def returned(engine: str, options: dict[str, Any]) -> None:
    """Runs on a rank: outputs in the order given, from rows, ready lists and packs."""
    import torch
    from scenario import ROWS, Bench, TokenLoss, cut, data, mask_of

    last = True
    bench = Bench(engine, **options)
    if engine == "megatron":
        from megatron.core import parallel_state

        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    class Loss(TokenLoss):
        outputs = ("logprobs", "token_sums", "ragged")

        def __call__(self, output, microbatch):
            total, metrics = super().__call__(output, microbatch)
            elementwise = -output.float() * mask_of(microbatch)
            return total, {
                **metrics,
                "logprobs": elementwise,
                "token_sums": elementwise.sum(1),
                "ragged": [row[:index] for index, row in enumerate(elementwise)],
            }

    batch = data(1, 3 * ROWS + 1, bench.replica)
    step_id = bench.step.begin(Loss(), global_batch_size=8, micro_batch_size=ROWS)
    rows = bench.step.microbatch(step_id, batch, microbatch_id="rows")
    ready = [*cut(batch, [1, 1, 1]), {name: value[-1:] for name, value in batch.items()}]
    again = bench.step.microbatch(step_id, microbatches=ready)
    assert bench.step.microbatch(step_id, batch, microbatch_id="rows") is rows
    number = len(batch["input_ids"])
    for receipt in (rows, again):
        assert (receipt.rows, receipt.microbatches) == (number, 4)
        if not last:
            assert (receipt.outputs, receipt.metrics()) == ({}, {})
            continue
        assert set(receipt.outputs) == set(Loss.outputs)
        values = receipt.outputs["logprobs"]
        assert len(values) == number
        assert not any(each.requires_grad for each in values)
        mask_BT = mask_of(batch)
        for index, each in enumerate(values):
            assert torch.equal(each != 0, mask_BT[index] != 0), "not in the order of the rows"
            assert torch.equal(receipt.outputs["token_sums"][index], each.sum())
            assert len(receipt.outputs["ragged"][index]) == index % ROWS
        sums = receipt.metrics()
        total = torch.stack(values).double().sum()
        # 32 products to a sum of a row, rounded in float32, and float64 beyond that.
        bound = sum(float(each.abs().sum()) for each in values) * 2**-24 * 32 * 4
        assert abs(sums["nll"] + float(total)) <= bound
        assert sums["rows"] == number
        assert sums["nll_max"] >= -float(torch.stack(values).min())
    if last:
        for one, two in zip(rows.outputs["logprobs"], again.outputs["logprobs"], strict=True):
            assert torch.equal(one, two) or engine == "fsdp"  # which has dropout
    bench.step.finish(step_id)


LAYOUTS = {"dp2": {}, "pp2": {"pp": 2}, "vpp": {"pp": 2, "vpp": 2, "layers_per_stage": 1}}


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_a_batch_returns_outputs_of_each_sample_in_order(megatron_ranks, layout):
    megatron_ranks(2, returned, "megatron", LAYOUTS[layout])


def test_a_batch_on_fsdp2_does_so_too(megatron_ranks):
    megatron_ranks(2, returned, "fsdp", {})


def of_a_pack() -> None:
    """Runs on a rank: values of a pack's tokens are split by sequence, without padding."""
    import torch
    from scenario import DEADLINE_S, TokenLoss, build, forward

    from megatron_idempotent import TrainStep

    class Loss(TokenLoss):
        outputs = ("values", "ids")

        def __call__(self, output, microbatch):
            place_T = torch.arange(output.shape[1], device=output.device)
            return output.float().sum(), {"values": place_T[None], "ids": torch.arange(3)}

    model, scheduler, _ = build()
    step = TrainStep(
        model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=DEADLINE_S
    )
    pack = {
        "input_ids": torch.ones(1, 32, dtype=torch.int64).cuda(),
        "cu_seqlens": torch.tensor([0, 5, 5, 9]),
        "cu_seqlens_padded": torch.tensor([0, 8, 8, 32]),
    }
    step_id = step.begin(Loss(), global_batch_size=2)
    receipt = step.microbatch(step_id, microbatches=[pack])
    found = [each.tolist() for each in receipt.outputs["values"]]
    assert found == [[0, 1, 2, 3, 4], [], [8, 9, 10, 11]]
    assert [each.tolist() for each in receipt.outputs["ids"]] == [0, 1, 2]
    step.abort(step_id)


def test_values_of_a_pack_are_split_by_sequence(megatron_ranks):
    megatron_ranks(1, of_a_pack)


def wrong(engine: str) -> None:
    """Runs on a rank: outputs and metrics that cannot be taken are named with their batch."""
    import torch
    from scenario import ROWS, Bench, TokenLoss, data, raised_by

    bench = Bench(engine)
    before = bench.parameters()
    for text, outputs, metrics in (
        ("'kl' of shape (2, 32): metrics are scalars", (), lambda output: {"kl": output}),
        ("'kl' as str: metrics are numbers", (), lambda output: {"kl": "0.1"}),
        ("names 'kl' in its `outputs`, and has returned 'nll'", ("kl",), lambda output: {"nll": 1}),
        ("'kl' as shape (1, 32) for 2 sequences", ("kl",), lambda output: {"kl": output[:1]}),
        ("'kl' as 3 tensors for 2 sequences", ("kl",), lambda output: {"kl": [output] * 3}),
        ("'kl' as float for 2 sequences", ("kl",), lambda output: {"kl": 1.0}),
    ):

        class Loss(TokenLoss):
            def __call__(self, output, microbatch, metrics=metrics):
                return output.sum(), metrics(output)

        Loss.outputs = outputs
        step_id = bench.step.begin(Loss(), global_batch_size=8, micro_batch_size=ROWS)
        told = raised_by(bench.step.microbatch, step_id, data(1, ROWS, bench.replica))
        assert text in str(told)
        bench.step.abort()
    assert torch.equal(bench.parameters(), before)


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_what_cannot_be_taken_is_refused_at_the_batch(megatron_ranks, engine):
    megatron_ranks(2 if engine == "fsdp" else 1, wrong, engine)
