"""Holds what `certify` finds in frameworks of August 2026, whose sources a variable gives.

`NEMO_RL_SOURCE`, `VERL_SOURCE`, `SKYRL_SOURCE` and `SLIME_SOURCE` name checkouts, `BRIDGE_SOURCE`
the folder `src` of Megatron-Bridge. Before a repair: `NEMO_RL_3659_SOURCE` (of #3660),
`SKYRL_2007_SOURCE` (of #2008).
"""

import os
import re
from pathlib import Path

import pytest

from megatron_idempotent.proof.certify import LAYOUTS, certify, layout

pytestmark = pytest.mark.full

#: Nobody tells the other ranks of a failure. A NaN is not seen, or only by the ranks that have it.
THEIRS = {"failure-on-one-rank", "nan"}
#: verl's offload takes parameters from buffers, which have them with the distributed optimizer.
OFFLOAD = {"offload-between-steps"}
#: verl's mean over no token is 0 / 0: a loss of NaN with a gradient of zero. verl updates with it,
#: and `TrainStep` refuses it.
EMPTY_MEAN = {"nothing-valid"}
#: SkyRL's reductions begin before the step's last microbatch (#2146): a step of another number of
#: microbatches than the first fails.
EARLY = {
    *("counts", "rows-left-over", "sizes-change", "uneven-replicas", "replica-without-rows"),
    *("drawn-sizes", "unwatched-steps"),
}
#: A masked sample counts as a token.
MASKED = {"counts", "sizes-change", "drawn-sizes", "nothing-valid", "unwatched-steps"}
#: By adapter: the variable, and the checks that fail on two replicas.
FAILED = {
    "NemoRL": ("NEMO_RL_SOURCE", THEIRS),
    "NemoRLOnTrainStep": ("NEMO_RL_SOURCE", set()),
    "Verl": ("VERL_SOURCE", THEIRS | OFFLOAD),
    "VerlOnTrainStep": ("VERL_SOURCE", OFFLOAD | EMPTY_MEAN),
    "SkyRL": ("SKYRL_SOURCE", THEIRS | EARLY),
    "SkyRLOnTrainStep": ("SKYRL_SOURCE", set()),
    "Slime": ("SLIME_SOURCE", THEIRS | MASKED),
    "Bridge": ("BRIDGE_SOURCE", THEIRS),
}
#: `dp2` has a test of its own; nobody has run frameworks on the others yet.
NOT_RUN = ("dp2", "dp2-moe", "dp2-tied-pp2", "dp2-bf16")
#: Their workers train one chunk in each stage.
ONE_CHUNK = ("NemoRL", "SkyRL")
#: They turn DDP's check for NaN on: where there is one replica all of its ranks may see a NaN.
CHECKED = ("NemoRL", "Slime", "Bridge")
#: Patches land only where `apply()` finds the framework, which is before its import.
ON_PATH = {"VERL_SOURCE", "SLIME_SOURCE", "BRIDGE_SOURCE"}


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def failed(adapter, variable, monkeypatch, pool, **options):
    source = os.environ.get(variable)
    if not source:
        pytest.skip(f"{variable} names no checkout")
    monkeypatch.setenv(re.sub(r"_\d+", "", variable), source)
    if variable in ON_PATH:
        monkeypatch.syspath_prepend(source)
    found = certify(f"certified:{adapter}", pool=pool, **options)
    return {each.check: each.fault for each in found if each.verdict == "failed"}


@pytest.mark.parametrize("adapter", FAILED)
def test_two_replicas(adapter, monkeypatch, megatron_rank_pool):
    variable, expected = FAILED[adapter]
    found = failed(adapter, variable, monkeypatch, megatron_rank_pool, layouts=["dp2"])
    assert found.keys() == expected, found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["dp2-pp2", *(name for name in LAYOUTS if name not in NOT_RUN)])
@pytest.mark.parametrize("adapter", FAILED)
def test_other_layouts(adapter, name, monkeypatch, megatron_rank_pool):
    if name == "vpp2" and adapter.startswith(ONE_CHUNK):
        pytest.skip("it trains one chunk in each stage")
    if layout(name).packs:
        pytest.skip("no adapter here trains on packs")
    variable, expected = FAILED[adapter]
    if layout(name).replicas == 1:
        expected = expected - {"uneven-replicas", "replica-without-rows"}
    if name == "dp2-distopt":  # in float32 a hundredth is within the roundings
        expected = expected - OFFLOAD - (MASKED if adapter == "Slime" else set())
    found = failed(adapter, variable, monkeypatch, megatron_rank_pool, layouts=[name])
    if layout(name).replicas == 1 and adapter in CHECKED:
        found.pop("nan", None)
        expected = expected - {"nan"}
    assert found.keys() == expected, found


def test_skyrl_without_overlap_as_its_configuration_has_it(monkeypatch, megatron_rank_pool):
    found = failed(
        "SkyRL", "SKYRL_SOURCE", monkeypatch, megatron_rank_pool, layouts=["dp2-nooverlap"]
    )
    assert found.keys() == THEIRS, found


OFF = "the gradient is off by "
TWICE_OR_APART = "the gradient is |has other bits in "
SET_UP_TWICE = "config.no_sync_func must be None"


@pytest.mark.parametrize(
    ("adapter", "variable", "place", "check", "stock", "said"),
    [
        # Reductions race there: ranks add each other's up, or drift apart.
        ("NemoRL", "NEMO_RL_3659_SOURCE", "dp2", "whole-step", True, TWICE_OR_APART),
        (
            "NemoRL",
            "NEMO_RL_3659_SOURCE",
            "dp2",
            "whole-step",
            False,
            "gradients were added to gradients",
        ),
        ("SkyRL", "SKYRL_2007_SOURCE", "dp2-nooverlap", "split-step", True, OFF),
        ("NemoRL", "NEMO_RL_SOURCE", "dp2-moe-sequences", "whole-step", False, OFF),
        ("NemoRL", "NEMO_RL_SOURCE", "dp2-mtp-sequences", "whole-step", False, OFF),
        ("NemoRL", "NEMO_RL_SOURCE", "dp2-mtp", "counts", False, OFF),
        ("NemoRL", "NEMO_RL_SOURCE", "dp2", "offload-in-mid-step", True, "moved no parameter"),
        ("SkyRL", "SKYRL_SOURCE", "dp2", "sizes-change", True, "has not been issued"),
        ("Slime", "SLIME_SOURCE", "dp2", "whole-step", True, SET_UP_TWICE),
        ("Verl", "VERL_SOURCE", "vpp2", "whole-step", True, SET_UP_TWICE),
        ("VerlPerToken", "VERL_6835_SOURCE", "cp2-moe", "whole-step", True, "e+04 % of its norm"),
    ],
    ids=[
        "nemo-rl-3660",
        "nemo-rl-3660-patched",
        "skyrl-2008",
        "nemo-rl-3888",
        "nemo-rl-3889",
        "nemo-rl-3881",
        "nemo-rl-offload",
        "skyrl-2146",
        "slime-2066",
        "verl-7380",
        "verl-6836",
    ],
)
def test_what_is_public_is_found(
    adapter, variable, place, check, stock, said, monkeypatch, megatron_rank_pool
):
    options = {"layouts": [place], "checks": [check], "stock": stock}
    found = failed(adapter, variable, monkeypatch, megatron_rank_pool, **options)
    assert any(each in found[check] for each in said.split("|")), found


@pytest.mark.parametrize(
    ("adapter", "name"), [("NemoRL", "dp2-sequences"), ("NemoRLOnTrainStep", "dp2-moe-sequences")]
)
def test_nemo_rls_loss_of_sequences_is_right_but_for_its_experts(
    adapter, name, monkeypatch, megatron_rank_pool
):
    options = {"layouts": [name], "checks": ["counts", "split-step", "auxiliary-losses"]}
    assert not failed(adapter, "NEMO_RL_SOURCE", monkeypatch, megatron_rank_pool, **options)


def test_a_masked_sample_counts_as_a_token_in_slime(monkeypatch, megatron_rank_pool):
    options = {"layouts": ["dp2"], "checks": ["counts"]}
    found = failed("Slime", "SLIME_SOURCE", monkeypatch, megatron_rank_pool, **options)
    # 212 tokens, and one masked sample on each of two replicas.
    assert found["counts"] == f"the gradient is {212 / 214:.4g} times the right one"


#: A hard one in each run that has a source; the others each week.
LAYERS = (
    *("dp2-distopt", "tp2-nosp", "vpp2", "cp2", "mtp", "tp2-ep2-etp1", "etp2", "ep2-distopt"),
    *("ep2-fp16-distopt", "dp2-bf16"),
)


@pytest.mark.parametrize(
    "name",
    ["tp2-bf16-distopt", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in LAYERS)],
)
def test_our_step_trains_bridges_adapters(name, monkeypatch, megatron_rank_pool):
    options = {"layouts": [name], "checks": ["low-rank-adapters"]}
    found = failed("BridgeLayers", "BRIDGE_SOURCE", monkeypatch, megatron_rank_pool, **options)
    assert not found
