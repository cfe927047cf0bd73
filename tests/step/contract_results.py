"""Reports of a step and of its batches, and of steps that update nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks
from scenario import ROWS, TokenLoss, cut, data, mask_of, raised_by, split_step
from step_backend import Backend
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_idempotent import WindowAborted

NO_AUXILIARY_LOSS = {"moe_aux_loss_coeff": 0.0}  # which counts masked tokens too


class Constant(TokenLoss):
    """A constant 0 where no sample counts."""

    def __call__(self, output: Any, microbatch: Any) -> Any:
        if not microbatch["sample_mask"].any():
            return 0.0, {"nll": 0.0}
        return super().__call__(output, microbatch)


class NotFinite(TokenLoss):
    """A loss that is not finite, or one whose gradient alone is not."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def __call__(self, output: Any, microbatch: Any) -> Any:
        loss, metrics = super().__call__(output, microbatch)
        zero = loss - loss.detach()
        slopes = {
            "loss is nan": loss * torch.nan,
            "loss is inf": loss * torch.inf,
            "gradients is nan": (zero * 0.0).sqrt(),  # 0 x infinity
            "gradients is inf": zero * 1e30,  # whose square float32 has not
        }
        return loss + slopes[self.what], metrics


class Outputs(TokenLoss):
    """Returns values of each sample: of its tokens, of itself, and of some tokens."""

    outputs = ("logprobs", "token_sums", "ragged")

    def __call__(self, output: Any, microbatch: Any) -> Any:
        total, metrics = super().__call__(output, microbatch)
        elementwise = -output.float() * mask_of(microbatch)
        return total, {
            **metrics,
            "logprobs": elementwise,
            "token_sums": elementwise.sum(1),
            "ragged": [row[:index] for index, row in enumerate(elementwise)],
        }


def _reads(run: Any) -> tuple[Any, int]:
    """Return what `run` returns, and how often it waits for a value from the device."""

    class Counting(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += func._opname == "_local_scalar_dense"
            return func(*args, **(kwargs or {}))

    with Counting() as counting:
        return run(), counting.number


class Results(Backend):
    """Steps and their batches report the same in any pieces."""

    @pytest.mark.full
    @on_ranks(2)
    def test_metrics_are_those_of_the_whole_step_on_all_ranks(self) -> None:
        """Metrics against float64 sums over all ranks' rows, taken from the masks."""
        shared = self.layout.get("tp", 1) * self.layout.get("pp", 1)
        number = torch.distributed.get_world_size() // shared
        batches = [data(1, 4 * ROWS, replica) for replica in range(number)]
        results = []
        for sizes in ([4], [1, 3], [1, 1, 1, 1]):
            bench = self.bench()
            mine, last = batches[bench.replica], len(sizes) > 1
            results.append(split_step(bench.step, bench.loss, mine, sizes, last=last))
            assert self.fsdp or bench.scheduler.num_steps == 8
        first = results[0]
        assert all(result == first for result in results[1:]), results
        tokens = sum(
            float((b["token_mask"][:, 1:] * b["sample_mask"][:, None]).sum()) for b in batches
        )
        sequences = sum(float(b["sample_mask"].sum()) for b in batches)
        assert (first.global_valid_tokens, first.global_valid_sequences) == (tokens, sequences)
        assert (first.updated, first.skipped) == (True, None)
        assert first.auxiliary_loss_scale == 0.25
        rows = first.rows
        assert first.microbatches == 4 * number == len(rows)
        assert first.metrics["rows"] == 4 * ROWS * number
        for row in rows:
            assert (row["global_valid_toks"], row["global_valid_seqs"]) == (tokens, sequences)
            assert (row["lr"], row["wd"]) == (first.lr, first.weight_decay)
            assert row["rows"] == ROWS
            # The same sum under two normalizers, and one that is not named.
            by_sequence = row["nll_by_sequence"] * sequences
            assert row["nll"] * tokens == pytest.approx(by_sequence, rel=1e-12)
            assert row["loss"] == row["nll"]
        for name in ("nll", "nll_by_sequence", "loss"):
            total = sum(row[name] for row in rows)
            assert first.metrics[name] == pytest.approx(total, rel=1e-12)
        assert first.metrics["nll_max"] == max(row["nll_max"] for row in rows)
        assert first.metrics["nll_min"] == min(row["nll_min"] for row in rows)
        assert first.metrics["nll_min"] < first.metrics["nll"] < first.metrics["nll_max"]
        # An untrained model is about as good as guessing: the mean is over valid tokens.
        assert 4 < first.metrics["nll"] < 6
        everywhere: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everywhere, first)
        assert all(other == first for other in everywhere)
        # One row per microbatch, whichever rank joins what ranks report; each says whose it is.
        assert tuple(row for other in everywhere for row in other.own_rows) == rows
        assert [row["replica"] for row in rows] == [
            each for each in range(number) for _ in range(4)
        ]
        assert len({row["rank"] for row in rows}) == number
        # Every rank of a replica can tell its own, those without losses too.
        assert first.replica_rows == tuple(row for row in rows if row["replica"] == bench.replica)
        of_replica = sum(row["loss"] for row in first.replica_rows)
        assert sum(row["loss"] for row in first.own_rows) in (
            0.0,  # of a rank for which another one of its replica reports
            pytest.approx(of_replica, rel=1e-12),
        )

    @on_ranks(2)
    def test_a_batch_returns_outputs_of_each_sample_in_order(self) -> None:
        """Outputs in the order given, from rows and ready lists."""
        bench = self.bench(loss=Outputs())
        batch = data(1, 3 * ROWS + 1, bench.replica)
        ready = [*cut(batch, [1, 1, 1]), {name: value[-1:] for name, value in batch.items()}]
        step_id = bench.begin()
        by_rows = bench.step.microbatch(step_id, batch)
        by_list = bench.step.microbatch(step_id, microbatches=ready)
        number = len(batch["input_ids"])
        for receipt in (by_rows, by_list):
            assert (receipt.rows, receipt.microbatches) == (number, 4)
            if not self.has_losses:
                assert (receipt.outputs, receipt.metrics()) == ({}, {})
                continue
            assert set(receipt.outputs) == set(Outputs.outputs)
            values = receipt.outputs["logprobs"]
            assert len(values) == number
            assert not any(each.requires_grad for each in values)
            for index, (value, mask_T) in enumerate(zip(values, mask_of(batch), strict=True)):
                assert torch.equal(value != 0, mask_T != 0), "not in the order of the rows"
                assert torch.equal(receipt.outputs["token_sums"][index], value.sum())
                assert len(receipt.outputs["ragged"][index]) == index % ROWS
            sums = receipt.metrics()
            total = torch.stack(values).double().sum()
            # 32 products to a sum of a row, rounded in float32, and float64 beyond that.
            bound = sum(float(each.abs().sum()) for each in values) * 2**-24 * 32 * 4
            assert abs(sums["nll"] + float(total)) <= bound
            assert sums["rows"] == number
            assert sums["nll_max"] >= -float(torch.stack(values).min())
        if self.has_losses and not self.fsdp:  # which has dropout
            both = by_rows.outputs["logprobs"], by_list.outputs["logprobs"]
            assert all(map(torch.equal, *both))
        bench.step.finish(step_id)

    @on_ranks(2)
    def test_a_step_in_which_nothing_is_valid_does_as_it_was_told(self) -> None:
        """Steps of masked samples, of no rows and of nothing, under both rules; some losses are a
        constant 0.
        """
        for rule, updated in (("skip", False), ("update", True)):
            bench = self.bench(step={"nothing_valid": rule}, config_overrides=NO_AUXILIARY_LOSS)
            masked = {**bench.batch(2), "sample_mask": torch.zeros(2 * ROWS).cuda()}
            # Momentum, which moves parameters in a step without gradients.
            bench.run([bench.batch(1, seed=2)])
            before, steps = bench.parameters(), getattr(bench.scheduler, "num_steps", 0)
            ways: list[tuple[list[Any], bool]]
            ways = [([masked], False), (list(cut(masked, [1, 1])), True)]
            if rule == "skip":
                ways += [(list(cut(masked, [0])), False), ([], False)]
            for loss in (Constant(), TokenLoss()):
                for pieces, last in ways:
                    result = bench.run(pieces, last=last, loss=loss)
                    assert result.updated == updated
                    assert (result.skipped is None) == updated
                    assert result.grad_norm == (0.0 if updated else None)
                    assert result.metrics.get("nll", 0.0) == 0.0
                    # Also those that are reduced already.
                    if self.fsdp and not updated:
                        assert all(each.grad is None for each in bench.module.parameters())
            assert torch.equal(bench.parameters(), before) != updated
            assert updated or getattr(bench.scheduler, "num_steps", 0) == steps
        # Half of the microbatches have a constant loss, on one rank only: they count as zeros.
        norms = []
        for loss in (Constant(), TokenLoss()):
            bench = self.bench()
            mine = bench.batch(2, full=True)
            if bench.replica == 0:
                mine["sample_mask"][:ROWS] = 0
            norms.append(bench.run(list(cut(mine, [1, 1])), loss=loss).grad_norm)
        assert norms[0] == norms[1] > 0

    @pytest.mark.parametrize(
        ("what", "last"),
        [
            ("loss is nan", True),
            pytest.param("gradients is nan", False, marks=pytest.mark.full),
            pytest.param("loss is inf", False, marks=pytest.mark.exhaustive),
            pytest.param("gradients is inf", True, marks=pytest.mark.exhaustive),
        ],
    )
    @on_ranks(2)
    def test_what_is_not_finite_updates_nothing(self, what: str, last: bool) -> None:
        """Rank 1's step is refused and taken back; skipped; updated with, for who wants it."""

        def run(rule: str) -> Any:
            bench = self.bench(step={"non_finite": rule})
            spoilt = self.has_losses and (bench.rank == 1)
            bench.run([bench.batch(2, seed=2)])
            bad = NotFinite(what) if spoilt else TokenLoss()

            def one_step(loss: Any = bad) -> Any:
                return bench.run(list(cut(bench.batch(2), [1, 1])), last=last, loss=loss)

            return bench, one_step

        bench, one_step = run("refuse")
        before, parameters = bench.digest(), bench.parameters()
        told = raised_by(one_step)
        assert isinstance(told, WindowAborted), told
        text = what.replace("loss", "the loss of its microbatch 1")
        assert text.replace("gradients", "the norm of the gradients") in str(told)
        assert set(told.failures) == ({1} if what.startswith("loss") else {0, 1})
        assert bench.step.open_step_id is not None
        bench.step.abort()
        assert bench.digest() == before
        good, refusing = _reads(lambda: one_step(TokenLoss()))
        assert good.updated

        bench, one_step = run("skip")
        result = one_step()
        assert not result.updated
        assert what.split()[0] in result.skipped
        assert torch.equal(bench.parameters(), parameters)
        good, skipping = _reads(lambda: one_step(TokenLoss()))
        assert good.updated

        bench, one_step = run("update")
        _, updating = _reads(lambda: one_step(TokenLoss()))
        assert one_step().updated
        assert what == "gradients is inf" or bench.parameters().isnan().any()

        # Looking costs no wait for the device: the norm that is reported is the one looked at.
        assert refusing == skipping == updating
