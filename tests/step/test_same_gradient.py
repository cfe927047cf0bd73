"""A step in any number of pieces is the one-shot step, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import tiered
from scenario import differing

#: Pieces of a step's microbatches, and whether the last one is given as such.
SIZES = (([3], False), ([1, 2], False), ([1, 2], True), ([1] * 3, True))


Sizes = tuple[tuple[list[int], bool], ...]


def compared(sizes: Sizes, options: dict[str, Any]) -> dict[str, Any]:
    """Runs on a rank: two steps in pieces against two at once; the ways that differ."""
    at_once = [("once", sum(sizes[0][0]), {"seed": seed}) for seed in (1, 2)]
    ways = {
        f"{pieces} {last}": ([("step", pieces, {"seed": n, "last": last}) for n in (1, 2)], ())
        for pieces, last in sizes
    }
    return differing(options, at_once, ways)


EVEN = (([6], False), ([2, 4], False), ([2, 4], True))
VPP = {"pp": 2, "vpp": 2, "layers_per_stage": 1}
BIAS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
}
FREED = {"deallocate_pipeline_outputs": True}  # as Megatron's command-line arguments have it
BY_SEQUENCE = {"moe_router_load_balancing_type": "seq_aux_loss"}
LAYOUTS: dict[str, tuple[int, Sizes, dict[str, Any]]] = {
    "dp2": (2, SIZES, {}),
    "dp2, all-reduce": (2, SIZES, {"distributed_optimizer": False}),
    "dp2, no overlap": (2, SIZES, {"overlap_grad_reduce": False}),
    "dp2, gathers": (2, SIZES, {"overlap_param_gather": True}),
    "dp2, tied": (2, SIZES, {"tied": True, "overlap_param_gather": True}),
    "dp2, bf16": (2, SIZES, {"dtype": "bf16"}),
    "dp2, fp16": (2, SIZES, {"dtype": "fp16", "loss_scale": 256.0}),
    "pp2": (2, SIZES, {"pp": 2}),
    # One bucket: with more, 0.12 maps the shared weight to two of them, and asserts.
    "pp2, tied": (
        2,
        SIZES,
        {
            "pp": 2,
            "tied": True,
            "config_overrides": FREED,
            "ddp_overrides": {"bucket_size": 1 << 30},
        },
    ),
    "pp2 dp2, gathers": (4, SIZES, {"pp": 2, "overlap_param_gather": True}),
    "pp2 vpp2": (2, EVEN, VPP),
    "pp2 vpp2 dp2, aligned": (4, EVEN, {**VPP, "align": True, "overlap_param_gather": True}),
    "tp2, sequence parallel": (2, SIZES, {"tp": 2, "sequence_parallel": True}),
    "tp2 dp2": (4, SIZES, {"tp": 2, "overlap_param_gather": True, "tied": True}),
    "cp2": (2, SIZES, {"cp": 2, "overlap_param_gather": True}),
    "cp2 dp2": (4, SIZES, {"cp": 2, "tied": True, "overlap_param_gather": True}),
    "cp2 tp2": (4, SIZES, {"cp": 2, "tp": 2, "sequence_parallel": True}),
    "cp2 pp2 vpp2": (4, EVEN, {**VPP, "cp": 2, "align": True, "overlap_param_gather": True}),
    "cp2 ep2": (2, SIZES, {"cp": 2, "ep": 2, "experts": 4}),
    "experts": (2, SIZES, {"experts": 4}),
    "experts, by sequence": (2, SIZES, {"experts": 4, "config_overrides": BY_SEQUENCE}),
    "experts, z loss": (2, SIZES, {"experts": 4, "config_overrides": {"moe_z_loss_coeff": 1e-2}}),
    "tp2, experts": (2, SIZES, {"experts": 4, "tp": 2, "sequence_parallel": True}),
    "ep2": (2, SIZES, {"experts": 4, "ep": 2, "overlap_param_gather": True}),
    "expert bias": (2, SIZES, {"experts": 4, "config_overrides": BIAS}),
}


ALWAYS = (
    "dp2, gathers",
    "pp2, tied",
    "pp2 vpp2 dp2, aligned",
    "ep2",
)


@pytest.mark.parametrize("layout", tiered(LAYOUTS, ALWAYS, "full"))
def test_pieces(megatron_ranks, layout):
    ranks, sizes, options = LAYOUTS[layout]
    assert megatron_ranks(ranks, compared, sizes, options, timeout_s=120) == [{}] * ranks
