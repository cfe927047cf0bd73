"""The command for a machine with a GPU: its folder of wheels, its environment and its report."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import gpu_environment
import gpu_report
import gpu_stages
import pytest
import wheels

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FACTS = {
    "python": "3.12.3", "torch": "2.11.0+cu130", "cuda": "13.0", "devices": 1,
    "device": "NVIDIA H100 80GB HBM3", "driver": "580.159.04", "paths": ["/x"], "installed": [],
}  # fmt: skip


def test_without_a_gpu_it_says_so_in_one_line_and_does_nothing(tmp_path):
    run = subprocess.run(
        [sys.executable, str(HERE / "run.py"), "--work", str(tmp_path / "out")],
        capture_output=True, text=True, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert run.returncode == 3
    assert re.fullmatch(r"no GPU tests: torch \S+ \(CUDA \S+\) finds no GPU here\n", run.stdout)
    assert not (tmp_path / "out").exists()


def test_the_wheels_are_pinned_and_none_is_the_machines_own():
    wanted = wheels.requirements((HERE / "wheels.txt").read_text())
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", each) for each in wanted), wanted
    assert not [each for each in wanted if each.startswith(wheels.ITS_OWN)]
    makefile = (ROOT / "Makefile").read_text()
    newest = re.search(r"MEGATRON \?= (\S+)", makefile)
    assert newest is not None
    assert f"megatron-core=={newest[1]}" in wanted


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({**FACTS, "torch": None}, "no GPU tests: this Python has no torch; name another one"),
        ({**FACTS, "devices": 0}, "no GPU tests: torch 2.11.0+cu130 (CUDA 13.0) finds no GPU here"),
    ],
)
def test_what_a_machine_lacks_is_one_line(facts, why):
    machine = gpu_environment.Machine(facts=facts)
    assert str(machine.why_not()).startswith(why)
    assert gpu_environment.Machine(facts=FACTS).why_not() is None


def test_a_report_keeps_the_stages_of_an_earlier_call_on_the_same_machine(tmp_path):
    rows = [{"id": "a", "verdict": "proven"}, {"id": "b", "verdict": "not_repaired"}]
    first = gpu_report.Report(tmp_path, FACTS, dry=False)
    assert not gpu_report.all_good(rows)
    first.stage("prove", outcome="failed", seconds=3.0, rows=rows, said="")
    second = gpu_report.Report(tmp_path, FACTS, dry=False)
    good = [{"test": "t|1", "outcome": "passed", "seconds": 0.25}]
    second.stage("suites", outcome="passed", seconds=1.0, rows=good, said="")
    found = json.loads((tmp_path / "report.json").read_text())
    assert list(found["stages"]) == ["prove", "suites"]
    assert second.failed == ["prove"]
    assert "paths" not in found["machine"]
    page = (tmp_path / "report.md").read_text()
    for line in (
        "# NVIDIA H100 80GB HBM3",
        "| driver | 580.159.04 |",
        "## prove: failed, 3 s",
        "| b | not_repaired |",
        "| t\\|1 | passed | 0.25 |",
        "| weights broadcast by NCCL (ProcessGroupSender) | two GPUs |",
    ):
        assert line in page.splitlines()
    assert gpu_report.Report(tmp_path, {**FACTS, "device": "B200"}, dry=False).failed == []


def test_a_stage_that_is_out_of_time_is_ended_with_what_it_had_found(tmp_path):
    run = gpu_stages.Run(
        python=Path(sys.executable), environ=dict(os.environ), out=tmp_path, device="cuda", jobs=1
    )
    run.deadline_s = time.monotonic() + 2.0
    process = run.start("slow", "-c", "print('found', flush=True); import time; time.sleep(60)")
    assert process.wait() is None
    assert process.output == "found\n"


def test_the_numbers_of_a_benchmark_are_rows_held_to_their_aims():
    found = {"wall": {"ratio": {"value": 1.02, "at_most": 1.01}, "stock_ms": 3}, "name": "x"}
    assert list(gpu_stages._numbers("patched_step", found)) == [
        {"benchmark": "patched_step", "number": "wall, ratio", "value": 1.02, "aim": "<= 1.01",
         "outcome": "missed"},
        {"benchmark": "patched_step", "number": "wall, stock_ms", "value": 3, "aim": "",
         "outcome": "ok"},
    ]  # fmt: skip
    assert not gpu_report.all_good([{"outcome": "missed"}])
    rows = [{"side": "consume", "tokens": 8, "share": {"value": 0.9, "at_least": 0.85}}]
    each = {"cases": rows, "pauses": {"staged": [0.1, 0.2]}}
    assert [row for row in gpu_stages._numbers("x", each) if row["aim"]] == [
        {"benchmark": "x", "number": "cases: consume, 8 tokens, share", "value": 0.9,
         "aim": ">= 0.85", "outcome": "ok"},
    ]  # fmt: skip
