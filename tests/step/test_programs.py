"""A step of `TrainStep` in any pieces is the step at once, to the bit, in every layout.

A feature that may change a gradient is a row of LAYOUTS: each runs the program of all operations.
"""

from __future__ import annotations

from typing import Any

import pytest
from random_programs import run_many
from ranks import VIRTUAL
from scenario import SequenceLoss
from step_programs import ran

GATHERS = {"overlap_param_gather": True}
BIAS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
}
FREED = {"deallocate_pipeline_outputs": True}  # as Megatron's command-line arguments have it
BY_SEQUENCE = {"moe_router_load_balancing_type": "seq_aux_loss"}
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
EXPERTS = {"experts": 4}
SHARED = {**EXPERTS, "ep": 2}
TP_SP = {"tp": 2, "sequence_parallel": True}
FP16 = {"dtype": "fp16", "loss_scale": 256.0}
ALIGNED = {**VIRTUAL, "align": True, **GATHERS}
# One bucket: with more, 0.12 maps the shared weight to two of them, and asserts.
ONE_BUCKET = {"ddp_overrides": {"bucket_size": 1 << 30}}
#: Layout → ranks, options of the bench.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp2, all-reduce": (2, {"distributed_optimizer": False}),
    "dp2, no overlap": (2, {"overlap_grad_reduce": False}),
    "dp2, gathers": (2, GATHERS),
    "dp2, by sequence": (2, {"loss": SequenceLoss()}),
    "dp2, tied": (2, {"tied": True, **GATHERS}),
    "dp2, bf16": (2, {"dtype": "bf16"}),
    "dp2, fp16": (2, FP16),
    "pp2": (2, {"pp": 2}),
    "pp2, tied": (2, {"pp": 2, "tied": True, "config_overrides": FREED, **ONE_BUCKET}),
    "pp2 dp2, gathers": (4, {"pp": 2, **GATHERS}),
    "pp2 vpp2": (2, VIRTUAL),
    "pp2 vpp2 dp2, aligned": (4, ALIGNED),
    "tp2, sequence parallel": (2, TP_SP),
    "tp2 dp2": (4, {"tp": 2, "tied": True, **GATHERS}),
    "tp2 pp2": (4, {"pp": 2, **TP_SP}),
    "cp2": (2, {"cp": 2, **GATHERS}),
    "cp2 dp2": (4, {"cp": 2, "tied": True, **GATHERS}),
    "cp2 tp2": (4, {"cp": 2, **TP_SP}),
    "cp2 pp2 vpp2": (4, {**ALIGNED, "cp": 2}),
    "cp2 ep2": (2, {**SHARED, "cp": 2}),
    "experts": (2, EXPERTS),
    "experts, by sequence": (2, {**EXPERTS, "config_overrides": BY_SEQUENCE}),
    "experts, z loss": (2, {**EXPERTS, "config_overrides": {"moe_z_loss_coeff": 1e-2}}),
    "tp2, experts": (2, {**EXPERTS, **TP_SP}),
    "ep2": (2, {**SHARED, **GATHERS}),
    "critic, dp2": (2, {**GATHERS, "task": "critic"}),
    "critic, tp2": (2, {"tp": 2, "task": "critic"}),
    "critic, tp2, sequence parallel": (2, {**TP_SP, "task": "critic"}),
    "critic, pp2": (2, {"pp": 2, "task": "critic"}),
    "critic, pp2, bf16": (2, {"pp": 2, "dtype": "bf16", "task": "critic"}),
    "critic, tp2 pp2": (4, {"pp": 2, **TP_SP, "task": "critic"}),
    "reward, dp2": (2, {"task": "reward"}),
    "reward, pp2": (2, {"pp": 2, "task": "reward"}),
    "expert bias": (2, {**EXPERTS, "config_overrides": BIAS}),
}
ALWAYS = ("dp2, gathers", "pp2, tied", "tp2 pp2", "pp2 vpp2 dp2, aligned", "ep2")

# Adapters beside frozen weights. Most parameters are in no gradient buffer then, and of a stage, or
# of all the experts, often none is.
SMALL = {"ddp_overrides": {"bucket_size": 600}}  # a few adapters in each bucket
FIRST, LAST = {"layers": (1, 2)}, {"layers": (3, 4)}
ONE_CHUNK = {"layers": (3,)}
ATTENTION = {"targets": ("linear_qkv", "linear_proj")}
IN_EXPERTS = {"targets": ("linear_fc1", "linear_fc2")}
#: Layout → ranks, options of the bench, what is trained: arguments of `Lora`.
ADAPTERS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2": (2, SMALL, {}),
    "dp2, gathers": (2, {**GATHERS, **SMALL}, {}),
    "dp2, no overlap": (2, {"overlap_grad_reduce": False}, {}),
    "dp2, all-reduce": (2, {"distributed_optimizer": False, **SMALL}, {}),
    "dp2, bf16": (2, {"dtype": "bf16", **GATHERS, **SMALL}, {}),
    "dp2, fp16": (2, FP16, {}),
    "dp2, a norm and the head too": (2, GATHERS, {"trained": ("final_layernorm", "output_layer")}),
    "tp2": (2, {"tp": 2}, {}),
    "tp2, sequence parallel": (2, TP_SP, {}),
    "tp2 dp2, tied": (4, {"tp": 2, "tied": True, **GATHERS}, {}),
    "pp2, nothing on the last stage": (2, {"pp": 2}, FIRST),
    "pp2, nothing on the first stage": (2, {"pp": 2}, LAST),
    "pp2, nothing on the first, all-reduce": (2, {"pp": 2, "distributed_optimizer": False}, LAST),
    "pp2, nothing on the first, fp16": (2, {"pp": 2, **FP16}, LAST),
    "pp2, tied and frozen": (2, {"pp": 2, "tied": True}, FIRST),
    "pp2, recomputed": (2, {"pp": 2, "config_overrides": RECOMPUTED}, {}),
    "pp2 dp2, nothing on the first stage": (4, {"pp": 2, **GATHERS}, LAST),
    "pp2 vpp2, one chunk": (2, VIRTUAL, ONE_CHUNK),
    "pp2 vpp2 dp2, aligned, one chunk": (4, ALIGNED, ONE_CHUNK),
    "experts": (2, EXPERTS, {}),
    "ep2": (2, {**SHARED, **GATHERS}, {}),
    "ep2, attention only": (2, {**SHARED, **GATHERS}, ATTENTION),
    "ep2, experts only": (2, SHARED, IN_EXPERTS),
    "ep2, the router only": (2, SHARED, {"targets": (), "trained": ("router",)}),
    "tp2, experts": (2, {**EXPERTS, **TP_SP, "etp": 1}, {}),
    "pp2, experts of the last stage": (2, {**EXPERTS, "pp": 2}, LAST),
}
ADAPTERS_IN_FULL = (
    "dp2, gathers",
    "tp2, sequence parallel",
    "pp2, nothing on the first stage",
    "pp2 vpp2 dp2, aligned, one chunk",
    "ep2, attention only",
)
CASES = [
    *(
        pytest.param(*row, id=name, marks=() if name in ALWAYS else pytest.mark.full)
        for name, row in LAYOUTS.items()
    ),
    *(
        pytest.param(
            ranks,
            {**options, "adapted": adapted},
            id=f"adapters, {name}",
            marks=pytest.mark.full if name in ADAPTERS_IN_FULL else pytest.mark.exhaustive,
        )
        for name, (ranks, options, adapted) in ADAPTERS.items()
    ),
]


@pytest.mark.parametrize(("ranks", "options"), CASES)
def test_a_program_of_all_operations(megatron_ranks, ranks, options):
    megatron_ranks(ranks, ran, "megatron", options, timeout_s=120)


DRAWN = ("dp2, gathers", "dp2, all-reduce", "pp2", "pp2 dp2, gathers")


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", DRAWN)
def test_any_program_of_many(megatron_ranks, layout):
    ranks, options = LAYOUTS[layout]
    run_many(megatron_ranks, ranks, "megatron", {**options, "layers_per_stage": 1})
