"""Holds what `certify` finds in frameworks' own savers and loaders, whose sources a variable gives.

`NEMO_RL_SOURCE`, `VERL_SOURCE`, `SKYRL_SOURCE` and `SLIME_SOURCE` name checkouts of August 2026,
`BRIDGE_SOURCE` the folder `src` of Megatron-Bridge.
"""

import os
from pathlib import Path

import pytest

from megatron_idempotent.patching.source import locate
from megatron_idempotent.proof.certify import certify

pytestmark = pytest.mark.skipif(
    locate("megatron.training.training") is None,
    reason="this release's wheel does not carry megatron.training, which slime imports",
)

#: By adapter: the variables, and the checks that fail on a layout.
FAILED = {
    "SkyRL": (("SKYRL_SOURCE",), {"load-weights-alone", "keeps-random"}),
    "Verl": (("VERL_SOURCE",), {"load-weights-alone", "keeps-scheduler"}),
    "Bridge": (("BRIDGE_SOURCE",), set()),
    "BridgeAdapters": (("BRIDGE_SOURCE",), set()),
    "NemoRL": (("NEMO_RL_SOURCE", "BRIDGE_SOURCE"), set()),
    "Slime": (("SLIME_SOURCE",), set()),
}
CHECKS = (
    "save-and-go-on",
    "load-into-new-model",
    "load-into-live-run",
    "rollback",
    "load-weights-alone",
    "keeps-scheduler",
    "keeps-random",
    "keeps-counters",
)


@pytest.mark.parametrize("adapter", FAILED)
def test_a_run_goes_on_as_it_was_saved(adapter, monkeypatch, megatron_rank_pool):
    variables, expected = FAILED[adapter]
    for variable in variables:
        if not os.environ.get(variable):
            pytest.skip(f"{variable} names no checkout")
        monkeypatch.syspath_prepend(os.environ[variable])  # where `apply()` finds it
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    options = {"checks": CHECKS, "layouts": ["tp2-pp2-bf16-distopt"], "pool": megatron_rank_pool}
    found = {
        each.check: each.fault
        for each in certify(f"savers:{adapter}", **options)
        if each.verdict == "failed"
    }
    assert found.keys() == expected, found
