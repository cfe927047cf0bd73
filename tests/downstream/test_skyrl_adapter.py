"""`examples/skyrl_step.py` beside SkyRL's own window, with its losses and log-probs.

Whether a window is the right one, also after a call that raised, certify tells
(test_certified.py, `SkyRLOnTrainStep`): here the bits are SkyRL's.

`SKYRL_SOURCE` names a checkout of SkyRL, as of August 2026.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from adapters import adapter, same_bits

SOURCE = os.environ.get("SKYRL_SOURCE", "")
LOSSES: dict[str, dict[str, Any]] = {
    "policy loss": {},
    "cross entropy": {"loss_fn": "cross_entropy"},
}
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not SOURCE, reason="SKYRL_SOURCE names no checkout of SkyRL"),
]


def worker(adapted: bool, **layout: Any) -> Any:
    """Runs on a rank: SkyRL's worker, with the adapter or without."""
    from skyrl_worker import SkyWorker, modules

    import megatron_idempotent

    megatron_idempotent.apply()
    modules(SOURCE)
    made = adapter("skyrl") if adapted else None
    return SkyWorker(SOURCE, made, **{"overlap_grad_reduce": False, **layout})


def windows(adapted: bool, *, layout: Any = None, **options: Any) -> Any:
    """The parameters after two windows of two calls, and all that their calls and steps
    returned."""
    sky = worker(adapted, **(layout or {}))
    found = [sky.step(seed, (2, 4), **options) for seed in range(2)]
    assert found[0][0] > 0
    return sky.parameters(), found


def compared() -> dict[str, bool]:
    """Runs on a rank; returns what has the bits of SkyRL's own window."""
    # Overlap has other buckets, so the norm is summed in another order: nothing is clipped.
    large = {"optimizer_overrides": {"clip_grad": 1e9}}
    overlap = {"overlap_grad_reduce": True, **large}
    experts = {"experts": 4, "config_overrides": {"moe_aux_loss_coeff": 1.0}}
    return {
        **same_bits(windows, {**LOSSES, "experts": {"layout": experts}}),
        "overlap": windows(True, layout=overlap)[0] == windows(False, layout=large)[0],
    }


def test_windows_of_several_calls_have_the_bits_of_skyrls(megatron_ranks):
    for found in megatron_ranks(2, compared, timeout_s=400):
        assert all(found.values()), found


def packed(layout: dict[str, Any]) -> dict[str, bool]:
    """Runs on a rank; returns what has the bits of SkyRL's own window on the same packs."""
    layout = {"packed": True, **layout}
    return same_bits(windows, {name: {**loss, "layout": layout} for name, loss in LOSSES.items()})


@pytest.mark.parametrize(
    "layout", [{}, {"pp": 2}, {"cp": 2, "experts": 4}, {"cp": 2, "pp": 2}], ids=str
)
def test_packs_have_the_bits_of_skyrls_windows(layout, megatron_ranks):
    ranks = 4 if "cp" in layout and "pp" in layout else 2
    for found in megatron_ranks(ranks, packed, layout, timeout_s=400):
        assert all(found.values()), found
