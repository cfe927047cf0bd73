"""Holds what `certify` finds in frameworks' own savers and loaders, whose sources a variable gives.

`NEMO_RL_SOURCE`, `VERL_SOURCE`, `SKYRL_SOURCE` and `SLIME_SOURCE` name checkouts of August 2026,
`BRIDGE_SOURCE` the folder `src` of Megatron-Bridge, `RESILIENCY_SOURCE` that of NVIDIA's resiliency
extension.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_idempotent.patching.catalog import hazards
from megatron_idempotent.patching.source import locate
from megatron_idempotent.proof.certify import certify

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        locate("megatron.training.training") is None,
        reason="this release's wheel does not carry megatron.training, which slime imports",
    ),
]

NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"
CHOOSES = "megatron.core.dist_checkpointing.strategies.nvrx"
#: By adapter: the variables, and the checks that fail on a layout.
FAILED = {
    "SkyRL": (("SKYRL_SOURCE",), {"load-weights-alone", "keeps-random"}),
    # Random states come with the weights.
    "SkyRLSynced": (("SKYRL_SOURCE",), {"load-weights-alone", "keeps-random"}),
    "Verl": (("VERL_SOURCE",), {"load-weights-alone", "keeps-scheduler"}),
    "VerlSynced": (("VERL_SOURCE",), {"keeps-scheduler"}),
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
FAILURES = (
    "failed-save",
    "failed-load-file-missing",
    "failed-load-file-truncated",
    "failed-load-rank-cannot-read",
)


@pytest.fixture
def found(request, monkeypatch, megatron_rank_pool):
    """The checks that fail for an adapter, and why."""
    adapter, layout, checks = request.param
    for variable in FAILED[adapter][0]:
        if not os.environ.get(variable):
            pytest.skip(f"{variable} names no checkout")
        monkeypatch.syspath_prepend(os.environ[variable])  # where `apply()` finds it
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    options = {"checks": checks, "layouts": [layout], "pool": megatron_rank_pool}
    results = certify(f"savers:{adapter}", **options)
    return {each.check: each.fault for each in results if each.verdict == "failed"}


@pytest.mark.parametrize(
    ("found", "expected"),
    [((name, "tp2-pp2-bf16-distopt", CHECKS), failed) for name, (_, failed) in FAILED.items()],
    indirect=["found"],
)
def test_a_run_goes_on_as_it_was_saved(found, expected):
    assert found.keys() == expected, found


#: Bridge reads train_state.pt after it has loaded the weights in place: if the file is missing,
#: Bridge counts from 0 on, and if the file cannot be read, the weights are loaded all the same.
COUNTED_LAST = {
    "failed-load-file-missing": (
        "after a load although train_state.pt is missing rank 0 has other counters: consumed_"
    ),
    "failed-load-file-truncated": (
        "after a load that failed (a file is truncated, or empty; saved by save()) rank 0 has "
        "other weights: "
    ),
}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        *(
            pytest.param(
                (name, layout, checks),
                COUNTED_LAST if name in ("Bridge", "NemoRL") else {},
                id=f"{name}-{layout}",
            )
            for name, layout, checks in (
                # Loads of weights alone are judged above, without their remedy.
                *(
                    (name, "dp2-bf16-distopt", FAILURES)
                    for name in FAILED
                    if name not in ("SkyRL", "Verl")
                ),
                ("VerlSynced", "tp2-bf16", ("load-into-live-run", *FAILURES)),
            )
        ),
    ],
    indirect=["found"],
)
def test_a_failure_on_one_rank_is_known_to_all_and_changes_nothing(found, expected):
    assert found.keys() == expected.keys(), found
    for check, start in expected.items():
        assert found[check].startswith(start), found


@pytest.fixture
def resilient(tmp_path):
    """Return a function that runs a command beside the resiliency extension."""
    if "RESILIENCY_SOURCE" not in os.environ:
        pytest.skip("RESILIENCY_SOURCE names none")
    told = tmp_path / "nvidia_resiliency_ext-0.7.0.dist-info" / "METADATA"  # a checkout has none
    told.parent.mkdir()
    told.write_text("Metadata-Version: 2.1\nName: nvidia-resiliency-ext\nVersion: 0.7.0\n")
    path = filter(None, (os.environ["RESILIENCY_SOURCE"], tmp_path, os.environ.get("PYTHONPATH")))
    return functools.partial(
        subprocess.run,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("adapter", ["Resilient", "ResilientPersistent"])
def test_megatron_saves_through_the_resiliency_extension(resilient, adapter):
    checks = ("async-save", "load-into-new-process", *FAILURES)
    done = resilient(
        [sys.executable, "-m", "megatron_idempotent", "certify", "--state"]
        + [f"--check={check}" for check in checks]
        + ["--layout=dp2-bf16-distopt", f"megatron_idempotent.proof.certify.checkpoints:{adapter}"]
    )
    assert (done.returncode, f"{len(checks)} passed, 0 failed" in done.stdout) == (0, True), done


def test_what_saves_through_the_extension_meet_is_mended(resilient):
    ids = [each for each in hazards() if each.startswith("resiliency-")]
    done = resilient([sys.executable, "-m", "megatron_idempotent", "prove", "--json", *ids])
    found = {each["id"]: each["verdict"] for each in json.loads(done.stdout)}
    assert found.pop("resiliency-tensors-stale") in ("proven", "not_applicable")  # only 0.6 has it
    assert found == dict.fromkeys(found, "proven"), done
    assert len(found) == len(ids) - 1


@pytest.mark.skipif(locate(NVRX) is not None, reason="the resiliency extension is installed")
@pytest.mark.skipif(locate(CHOOSES) is None, reason="this release does not know the extension")
def test_nothing_else_saves_where_the_extension_is_missing(megatron_rank_pool):
    options = {"checks": ("async-save",), "layouts": ["dp2-bf16-distopt"]}
    adapter = "megatron_idempotent.proof.certify.checkpoints:Resilient"
    (found,) = certify(adapter, pool=megatron_rank_pool, **options)
    assert found.verdict == "failed"
    assert "`nvidia-resiliency-ext` installation is required" in found.fault
