"""The decision order and its outcomes, on the installed Megatron and on altered copies of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from alterations import alter

from megatron_idempotent.patching import OPEN, UNTRIED
from megatron_idempotent.patching.catalog import patches

SEED = "pipeline-seed-offset"
HOOKS = "forward-pre-hook-reentry"
RANDOM = "megatron/core/tensor_parallel/random.py"
DDP = "megatron/core/distributed/distributed_data_parallel.py"
INFO = "megatron/core/package_info.py"
SWITCH = "MEGATRON_IDEMPOTENT"


def set_version(root: Path, release: str) -> None:
    major, minor, patch = release.split(".")[:3]
    path = root / INFO
    path.unlink()
    number, rc, count = patch.partition("rc")
    path.write_text(
        f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {number}\nPRE_RELEASE = '{rc}{count}'\n"
    )


def test_patches_wait_for_the_import_of_megatron(cold):
    row = cold.run("outcomes")[SEED]
    assert row["status"] == "pending_import"
    assert row["reason"] == "lands when megatron.core.tensor_parallel.random is imported"


@pytest.mark.parametrize(
    ("arguments", "environ", "reason"),
    [
        ({"exclude": [SEED]}, {}, "named in exclude="),
        ({"only": [HOOKS]}, {}, "not in only="),
        ({}, {SWITCH: "0"}, "MEGATRON_IDEMPOTENT=0"),
        ({}, {f"{SWITCH}_DISABLE": f"{HOOKS}, {SEED}"}, "named in MEGATRON_IDEMPOTENT_DISABLE"),
        ({}, {f"{SWITCH}_ONLY": HOOKS}, "not in MEGATRON_IDEMPOTENT_ONLY"),
        ({"only": [SEED]}, {f"{SWITCH}_DISABLE": SEED}, "named in MEGATRON_IDEMPOTENT_DISABLE"),
        ({"only": [SEED]}, {f"{SWITCH}_ONLY": HOOKS}, "not in MEGATRON_IDEMPOTENT_ONLY"),
        ({"only": [SEED], "strict": True}, {SWITCH: "off"}, "MEGATRON_IDEMPOTENT=0"),
    ],
)
def test_arguments_disable_and_the_environment_wins_over_them(cold, arguments, environ, reason):
    row = cold.run("outcomes", environ=environ, **arguments)[SEED]
    assert (row["status"], row["reason"]) == ("disabled", reason)


def test_blank_variables_mean_what_unset_ones_mean(cold):
    blank = {f"{SWITCH}{name}": " " for name in ("", "_ONLY", "_DISABLE", "_STRICT", "_REBIND")}
    assert cold.run("outcomes", environ=blank) == cold.run("outcomes")


def test_without_megatron_nothing_is_installed(cold):
    row = cold.run("outcomes", bare=True)[SEED]
    assert row["status"] == "not_installed"
    assert row["reason"] == "megatron-core is not installed"
    assert row["version"] is None


def test_a_version_that_cannot_be_read_is_said_to_be_that(cold, megatron_copy):
    (megatron_copy / INFO).unlink()
    (megatron_copy / INFO).write_text("from somewhere import MAJOR, MINOR, PATCH\n")
    row = cold.run("outcomes", path=str(megatron_copy))[SEED]
    assert row["status"] == "not_installed"
    assert row["reason"] == f"no version of megatron-core can be read from {megatron_copy / INFO}"


@pytest.mark.parametrize("version", ["0.9.9", "0.11.0"])
def test_a_version_below_the_range_is_named_with_the_range(cold, megatron_copy, version):
    set_version(megatron_copy, version)
    row = cold.run("outcomes", path=str(megatron_copy))[SEED]
    assert row["status"] == "unsupported_version"
    assert row["reason"] == f"affects megatron-core {patches()[SEED].versions}, found {version}"
    assert row["version"] == version


@pytest.mark.parametrize("version", ["0.99.2", "0.20.0", "0.20.0rc0", "1.0.0"])
def test_above_what_was_run_the_bodies_decide(cold, megatron_copy, version):
    set_version(megatron_copy, version)
    alter(
        megatron_copy,
        DDP,
        "        assert self.use_forward_hook\n",
        "",
    )
    rows = cold.run("outcomes", path=str(megatron_copy), dry_run=True)
    above = f"{version} is above what was run; "
    assert rows[SEED]["status"] == "pending_import"
    assert rows[SEED]["reason"].startswith(f"{above}body reviewed on ")
    assert rows[HOOKS]["status"] == "drifted"
    assert rows[HOOKS]["reason"].startswith(above)
    assert rows[SEED]["version"] == rows[HOOKS]["version"] == version


def test_what_upstream_has_mended_stays_off_above_what_was_run(cold, megatron_copy):
    mended = [patch for patch in patches().values() if patch.before not in (UNTRIED, OPEN)]
    set_version(megatron_copy, "0.20.0")
    rows = cold.run("outcomes", path=str(megatron_copy), dry_run=True)
    of_megatron = [patch for patch in mended if patch.distribution == "megatron-core"]
    assert len(of_megatron) >= 3
    assert {rows[patch.id]["status"] for patch in of_megatron} == {"unsupported_version"}


@pytest.mark.parametrize("version", ["0.12.0", "0.12.0rc3", "0.19.7", "0.19.3rc1"])
def test_a_prerelease_counts_as_the_release_that_it_leads_to(cold, megatron_copy, version):
    set_version(megatron_copy, version)
    row = cold.run("outcomes", path=str(megatron_copy))[SEED]
    assert (row["status"], row["version"]) == ("pending_import", version)


def test_a_module_that_is_not_there_is_a_missing_target(cold, megatron_copy):
    (megatron_copy / RANDOM).unlink()
    row = cold.run("outcomes", path=str(megatron_copy))[SEED]
    assert row["status"] == "missing_target"
    assert row["reason"] == (
        "megatron.core.tensor_parallel.random is not on the path beside megatron-core"
    )


def test_a_function_that_is_not_there_is_a_missing_target(cold, megatron_copy):
    alter(megatron_copy, RANDOM, "def model_parallel_cuda_manual_seed", "def manual_seed_renamed")
    row = cold.run("outcomes", path=str(megatron_copy), dry_run=True)[SEED]
    assert row["status"] == "missing_target"
    assert row["reason"] == (
        "megatron.core.tensor_parallel.random defines no model_parallel_cuda_manual_seed"
    )


def test_a_body_that_does_by_itself_what_the_patch_does_is_fixed_upstream(cold, megatron_copy):
    alter(
        megatron_copy,
        RANDOM,
        "    offset = seed + 2718\n",
        "    seed = seed + 100 * get_pipeline_model_parallel_rank()\n    offset = seed + 2719\n",
    )
    row = cold.run("outcomes", path=str(megatron_copy), dry_run=True)[SEED]
    # Its body drifted as well, which does not matter any more.
    assert row["status"] == "fixed_upstream"
    assert row["reason"] == "upstream's own code no longer has the hazard"


def test_a_body_without_what_the_patch_relies_on_has_drifted(cold, megatron_copy):
    alter(megatron_copy, RANDOM, "offset = seed + 2718", "offset = seed + 2719")
    row = cold.run("outcomes", path=str(megatron_copy), dry_run=True)[SEED]
    assert row["status"] == "drifted"
    assert "model_parallel_cuda_manual_seed (body " in row["reason"]
    assert "no longer contains `offset = seed + 2718`" in row["reason"]
    assert "name the patch in only= to accept it" in row["reason"]


def test_a_pinned_body_that_differs_in_one_token_has_drifted(cold, megatron_copy):
    alter(
        megatron_copy,
        DDP,
        "def enable_forward_pre_hook(self):",
        "def enable_forward_pre_hook(self, now=True):",
    )
    row = cold.run("outcomes", path=str(megatron_copy), dry_run=True)[HOOKS]
    assert row["status"] == "drifted"
    assert "DistributedDataParallel.enable_forward_pre_hook has body " in row["reason"]
    assert "reviewed are fea102deaf61" in row["reason"]


def test_comments_docstrings_and_formatting_are_no_drift(cold, megatron_copy):
    before = cold.run("outcomes", path=str(megatron_copy), dry_run=True)[HOOKS]
    alter(
        megatron_copy,
        DDP,
        "def enable_forward_pre_hook(self):\n",
        "def enable_forward_pre_hook(\n        self,  # a remark\n    ):\n",
    )
    after = cold.run("outcomes", path=str(megatron_copy), dry_run=True)[HOOKS]
    assert before == after
    assert before["status"] == "pending_import"


def test_naming_a_drifted_patch_accepts_it(cold, megatron_copy):
    alter(megatron_copy, RANDOM, "offset = seed + 2718", "offset = seed + 2719")
    row = cold.run("outcomes", path=str(megatron_copy), only=[SEED])[SEED]
    assert row["status"] == "pending_import"
    assert "no longer contains `offset = seed + 2718`" in row["reason"]
    assert "accepted by name" in row["reason"]


def test_a_file_that_cannot_be_parsed_is_a_failure_that_names_it(cold, megatron_copy):
    alter(megatron_copy, RANDOM, "offset = seed + 2718", "offset = seed +")
    row = cold.run("outcomes", path=str(megatron_copy), dry_run=True)[SEED]
    assert row["status"] == "failed"
    assert row["reason"].startswith("cannot read megatron.core.tensor_parallel.random: ")


def test_the_first_reason_in_the_order_is_the_one_that_is_given(cold, megatron_copy):
    alter(megatron_copy, RANDOM, "offset = seed + 2718", "offset = seed + 2719")
    path = str(megatron_copy)
    assert cold.run("outcomes", path=path, exclude=[SEED], bare=True)[SEED]["status"] == "disabled"
    (megatron_copy / DDP).unlink()
    set_version(megatron_copy, "0.11.0")
    rows = cold.run("outcomes", path=path, dry_run=True)
    assert {rows[SEED]["status"], rows[HOOKS]["status"]} == {"unsupported_version"}
    set_version(megatron_copy, "0.19.0")
    rows = cold.run("outcomes", path=path, dry_run=True)
    assert (rows[SEED]["status"], rows[HOOKS]["status"]) == ("drifted", "missing_target")


def test_the_installed_megatron_needs_every_patch_that_it_has_the_code_for(cold):
    expected = {
        "pending_import": "",
        "missing_target": "is not on the path beside megatron-core",
        "unsupported_version": "affects megatron-core",
        "not_installed": "is not installed",
        "disabled": "off by default",
    }
    for row in cold.run("outcomes", dry_run=True).values():
        assert row["status"] in expected, row
        assert expected[row["status"]] in row["reason"], row
