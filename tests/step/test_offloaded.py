"""A step on an optimizer that is on the host: broken off, undone, and beside written weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks
from scenario import Bench, Broken, Fault, scenario

from megatron_idempotent import WindowAborted, ensure_main_params_synced


def layout(fraction: float, *, precise: bool = False) -> dict[str, Any]:
    return {
        "dtype": "bf16",
        "optimizer_overrides": {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": fraction,
            "use_precision_aware_optimizer": precise,
            "overlap_cpu_optimizer_d2h_h2d": True,
        },
        "step": {"undo": True},
    }


KINDS = [layout(0.5), layout(1.0), layout(0.5, precise=True)]


@on_ranks(2)
def test_a_step_that_broke_off_leaves_no_bit():
    """Steps that fail, in a loss or between two inner optimizers, change no bit."""
    for kind in KINDS[::2]:
        whole = [("step", [2]), ("step", [2], {"seed": 2}), ("step", [2], {"seed": 3})]
        want = scenario(kind, whole)
        failing = [("step", [2], {"seed": 9}), ("abort",)]
        actions = [step for each in whole for step in (*failing, each)]
        got = scenario(kind, actions, [Fault("loss", 3 * number) for number in range(3)])
        assert [each is None for each in got.told] == [False, True, True] * 3
        assert all(torch.equal(*pair) for pair in zip(got.bits[-1], want.bits[-1], strict=True))

        bench = Bench(**kind)
        for number in range(3):
            inner = bench.optimizer.chained_optimizers[0].optimizer.sub_optimizers
            assert len(inner) > 2

            def broken(*_: Any) -> None:
                raise Broken("out of memory")

            # The first ones have stepped by then.
            handle = inner[len(inner) // 2].register_step_pre_hook(broken)
            with pytest.raises(WindowAborted, match="All ranks can go back"):
                bench.run([bench.batch(2, seed=9)])
            handle.remove()
            bench.step.abort(bench.step_id)
            result = bench.run([bench.batch(2, seed=number + 1)])
        found = bench.bits(result)
        assert all(torch.equal(*pair) for pair in zip(found, want.bits[-1], strict=True))


@on_ranks(2)
def test_weights_beside_the_optimizer_are_refused_before_the_update():
    """The step after weights were written into the model."""
    for kind in ({"dtype": "bf16"}, *KINDS):
        bench = Bench(**kind)
        bench.run([bench.batch(2)])
        before = bench.parameters()
        with torch.no_grad():
            for each in bench.module.parameters():
                each.mul_(2.0)
        with pytest.raises(WindowAborted, match="written into the model, and not into the"):
            bench.run([bench.batch(2)])
        bench.step.abort(bench.step_id)
        assert torch.equal(bench.parameters(), 2 * before), "as it was written"
        assert ensure_main_params_synced(bench.optimizer) > 0
        bench.run([bench.batch(2)])
        assert (bench.parameters() - 2 * before).abs().max() < 0.1
