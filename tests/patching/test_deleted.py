"""Any case file can be deleted: nothing else changes, and what stands on it names it."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deletions import WINDOW_STANDS_ON

from megatron_idempotent.patching.base import INDEX, generated
from megatron_idempotent.patching.catalog import case_file_of, hazards, index_entries
from megatron_idempotent.patching.rows import COVERED

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
#: Of a process that deletes each by itself; about 100 s where nobody else runs.
DEADLINE_S = 300.0

#: What library code stands on, by the hazards that provide it.
STOOD_ON = {name: each.provides for name, each in index_entries().items() if each.provides}


@pytest.mark.parametrize("at_once", [46, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_deleting_any_case_files_changes_nothing_else_and_what_stands_on_one_names_it(
    cold, package, at_once
):
    """Delete a third of them at a time; each by itself with -m exhaustive."""
    for name in ("patching", "patches"):
        compileall.compile_dir(package / "megatron_idempotent" / name, quiet=1)
    each = [*STOOD_ON, *(hazard_id for hazard_id in hazards() if hazard_id not in STOOD_ON)]
    number = -(-len(each) // at_once)
    groups = [each[first::number] for first in range(number)]
    names = [[case_file_of(hazard_id) for hazard_id in group] for group in groups]
    whole, *found, last = cold.run(
        "deletions.in_turn", folder=package, groups=names, timeout_s=DEADLINE_S
    )
    assert last["imports"] == [], "the library imports without any case file"
    assert "accumulation_window() stands on patches that are not applied: " in last["window"]
    for name in WINDOW_STANDS_ON:
        hazard_id = Path(name).stem.replace("_", "-")
        assert f"{hazard_id} (its case file {name} is missing, and the index" in last["window"]
    index = generated(INDEX)
    assert whole["left"] == []
    assert sum(status in COVERED for status in whole["applied"].values()) > 30
    for group, seen in zip(groups, found, strict=True):
        for what in ("decided", "applied"):
            others = {key: row for key, row in whole[what].items() if key not in group}
            assert seen[what] == others, f"{what} without {group}"
        assert (seen["code"], seen["left"]) == (whole["code"], []), group
        assert 0 < seen["changed"] <= whole["changed"], group
        assert seen["index"] == [line for line in index if line.split(" ")[0] not in group], group
        provided = [
            (name, hazard_id) for hazard_id in group for name in STOOD_ON.get(hazard_id, ())
        ]
        assert seen["absent"].keys() == {name for name, _ in provided}
        for name, hazard_id in provided:
            said = f"{hazard_id} (its case file {case_file_of(hazard_id)} is missing"
            assert said in " ".join(seen["absent"][name])


#: Suites of library code that reaches Megatron through patches; minutes for each deletion.
SUITES = (
    *("patching", "window", "step/test_division.py", "step/test_failures.py"),
    *("step/test_contract.py", "step/test_ready.py", "step/test_programs.py"),
    *("step/test_lifecycle.py", "step/test_results.py", "step/test_uneven.py"),
    "patches/test_accumulation.py",
    *("patches/test_abort_window.py", "patches/test_guarded_window.py"),
    *("patches/test_ensure_params_synced.py", "logprobs/test_model.py"),
)


def suites_without(hazard_id: str) -> list[str]:
    """The files of SUITES that do not name the hazard, nor what it provides."""
    names = (hazard_id, hazard_id.replace("-", "_"), *STOOD_ON[hazard_id])
    found = []
    for suite in SUITES:
        path = ROOT / "tests" / suite
        for file in sorted(path.glob("test_*.py")) if path.is_dir() else [path]:
            text = file.read_text()
            if file != Path(__file__) and not any(name in text for name in names):
                found.append(str(file.relative_to(ROOT)))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("hazard_id", STOOD_ON)
def test_the_suites_of_the_library_pass_without_what_it_stands_on(hazard_id, megatron, tmp_path):
    leave = shutil.ignore_patterns("__pycache__", ".*", "benchmarks", "upstream", "build")
    shutil.copytree(ROOT, tmp_path, ignore=leave, dirs_exist_ok=True)
    (tmp_path / case_file_of(hazard_id)).unlink()
    index = tmp_path / "patches" / "_generated" / INDEX
    lines = [line for line in index.read_text().splitlines() if line.split(" ")[0] != hazard_id]
    index.write_text("".join(f"{line}\n" for line in lines))
    asked = suites_without(hazard_id)
    assert len(asked) > 20
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *asked]
    run = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-6000:]
