"""The commands that decide without importing Megatron, run as users run them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_idempotent.engine.catalogue import patches
from megatron_idempotent.engine.source import locate

PROBE = (
    "import sys; from megatron_idempotent.cli import main; code = main(sys.argv[1:]); "
    "loaded = {'torch', 'megatron', 'numpy'} & set(sys.modules); "
    "sys.exit(f'imported {loaded}' if loaded else code)"
)


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environ = dict(os.environ, COLUMNS="120")
    if path is not None:
        environ["PYTHONPATH"] = str(path)
    command = [sys.executable, "-c", PROBE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a few files of the installed Megatron, hiding the installed one."""
    for name in ("megatron.core.package_info", "megatron.core.tensor_parallel.random"):
        source = locate(name)
        assert source is not None
        copy = tmp_path / Path(*name.split(".")).with_suffix(".py")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    for folder in ("megatron", "megatron/core", "megatron/core/tensor_parallel"):
        (tmp_path / folder / "__init__.py").touch()
    return tmp_path


def test_doctor_prints_a_row_per_patch_and_imports_neither_torch_nor_megatron():
    result = run("doctor")
    assert result.returncode == 0, result.stderr
    for patch_id in patches():
        assert patch_id in result.stdout


def test_doctor_json_names_the_files_that_it_read():
    rows = json.loads(run("doctor", "--json").stdout)
    assert [row["id"] for row in rows] == list(patches())
    (row,) = (row for row in rows if row["id"] == "pipeline-seed-offset")
    assert row["files"] == {target: str(locate(target.split(":")[0])) for target in row["targets"]}
    assert row["status"] == "pending_import"


def test_doctor_exits_with_1_where_a_body_drifted(checkout):
    altered = checkout / "megatron/core/tensor_parallel/random.py"
    altered.write_text(altered.read_text().replace("offset = seed + 2718", "offset = seed + 1"))
    result = run("doctor", "--json", path=checkout)
    (row,) = (r for r in json.loads(result.stdout) if r["id"] == "pipeline-seed-offset")
    assert row["status"] == "drifted"
    assert "no longer contains `offset = seed + 2718`" in row["reason"]
    assert result.returncode == 1


def test_explain_prints_every_section_of_the_case_file():
    result = run("explain", "no-sync-func-reentry")
    assert result.returncode == 0
    for part in ("Symptom:", "Cause:", "Affects:", "Upstream:", "Remove when:", "Targets:"):
        assert part in result.stdout
    assert "megatron-idempotent prove no-sync-func-reentry" in result.stdout


@pytest.mark.parametrize("command", ["explain", "prove"])
def test_an_unknown_id_is_refused_with_the_nearest_known_one(command):
    result = run(command, "no-sync-reentry")
    assert result.returncode == 2
    assert "did you mean 'no-sync-func-reentry'?" in result.stderr
    assert "Traceback" not in result.stderr


def test_prove_says_that_a_release_without_the_code_is_not_applicable(checkout):
    result = run("prove", "train-interval-timer", "--json", path=checkout)
    (finding,) = json.loads(result.stdout)
    assert finding["verdict"] == "not_applicable"
    assert "megatron.training.training is not on the path" in finding["stock"]
    assert result.returncode == 0
