"""`examples/verl_step.py` beside verl's own engine, with its wiring, scaling and aggregated loss.

`VERL_SOURCE` names a checkout of verl, as of August 2026.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from adapters import adapter, same_bits

SOURCE = os.environ.get("VERL_SOURCE", "")
LARGE = {"optimizer_overrides": {"clip_grad": 1e9}}
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not SOURCE, reason="VERL_SOURCE names no checkout of verl"),
]


def worker(adapted: bool, **layout: Any) -> Any:
    """Runs on a rank: verl's engine, with the adapter or without."""
    from verl_worker import VerlWorker, modules

    import megatron_idempotent

    megatron_idempotent.apply()
    modules(SOURCE)
    return VerlWorker(SOURCE, adapter("verl") if adapted else None, **layout)


def batches(adapted: bool, **layout: Any) -> Any:
    """The parameters after two of verl's `train_batch`, and all that they returned."""
    verl = worker(adapted, **layout)
    found = [verl.train_batch(seed, 4) for seed in range(2)]
    if verl.engine.is_mp_src_rank_with_outputs():
        assert found[0]["metrics"]["grad_norm"] > 0
    return verl.parameters(), found


def compared() -> dict[str, bool]:
    """Runs on a rank; returns what has the bits of verl's own `train_batch`."""
    experts = {"experts": 4, "config_overrides": {"moe_aux_loss_coeff": 1.0}}
    tokens = {"moe_aux_loss_coeff": 1.0, "calculate_per_token_loss": True}
    per_token = {"experts": 4, "config_overrides": tokens}
    cases = {"dense": {}, "experts": experts, "experts, per token": per_token}
    return {**same_bits(batches, cases), "two calls": two_calls()}


def two_calls() -> bool:
    """Means over each half of the data add up to twice the mean over all of it."""

    def norm(adapted: bool, calls: int) -> float:
        verl = worker(adapted, **LARGE)
        verl.engine.optimizer_zero_grad()
        for data in verl.parts(verl.data(0, 4), calls):
            verl.engine.forward_backward_batch(data, verl.loss)
        return float(verl.engine.optimizer_step())

    once = norm(True, 1)
    assert once == norm(False, 1)
    return norm(True, 2) == 2 * once


def test_train_batch_on_the_adapter_has_the_bits_of_verls(megatron_ranks):
    for found in megatron_ranks(2, compared, timeout_s=400):
        assert all(found.values()), found


def packed(layout: dict[str, Any]) -> dict[str, bool]:
    """Runs on a rank; returns what has the bits of verl's own `train_batch` on the same packs."""
    layout = {"packed": True, **layout}
    cases = {
        name: {**layout, "config_overrides": {"calculate_per_token_loss": per_token}}
        for name, per_token in {"averaged": False, "per token": True}.items()
    }
    return same_bits(batches, cases)


@pytest.mark.parametrize(
    "layout", [{}, {"pp": 2}, {"cp": 2, "experts": 4}, {"cp": 2, "pp": 2}], ids=str
)
def test_packs_have_the_bits_of_verls_train_batch(layout, megatron_ranks):
    ranks = 4 if "cp" in layout and "pp" in layout else 2
    for found in megatron_ranks(ranks, packed, layout, timeout_s=400):
        assert all(found.values()), found
