"""Patches add no operator, no kernel launch and no wait for the device to a step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import megatron_idempotent
from megatron_idempotent.proof.cpu import tiny
from megatron_idempotent.proof.cpu.probes import Activity, activity

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"overlap_param_gather": True}),
    "two replicas": (2, {"overlap_param_gather": True}),
    "two replicas, bf16, all-reduce": (2, {"distributed_optimizer": False, "dtype": "bf16"}),
    "two stages": (2, {"pp": 2, "layers_per_stage": 1}),
}


def steps(options: dict[str, Any], extra: bool = False) -> tuple[dict[str, int], dict[str, Any]]:
    """Runs on a rank: what a stock step does, and what a patched one does more."""
    bench = tiny.build(**options)

    def step() -> None:
        bench.train_step(4, data_seed=0)

    def more() -> None:
        step()
        torch.ones((), device="cuda").sinh().item()

    step()  # makes what is made once
    stock = activity(step)
    megatron_idempotent.apply(strict=True)
    step()
    patched = activity(more if extra else step)
    return stock.totals(), patched.added_to(stock)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_patched_step_asks_no_more_of_the_device_than_a_stock_one(layout, megatron_ranks):
    ranks, options = LAYOUTS[layout]
    for stock, added in megatron_ranks(ranks, steps, options):
        assert stock["operators"] > 500, "nothing was counted"
        assert added == {}


def test_one_operator_more_is_counted(device, megatron_ranks):
    ((stock, added),) = megatron_ranks(1, steps, {}, True)
    assert added["aten::sinh"] >= 1  # once more by its variant with an output
    if device == "cuda":
        assert stock["launches"] > 100
        assert added["copies_to_host"] == 1
        assert added["waits"] == 1


def test_the_difference_names_only_what_is_more():
    before = Activity(operators=Counter(a=2, b=1), launches=5, waits=1, copies_to_host=0)
    after = Activity(operators=Counter(a=1, b=3), launches=5, waits=2, copies_to_host=0)
    assert after.added_to(before) == {"b": 2, "waits": 1}
