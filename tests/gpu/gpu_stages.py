"""The stages of a GPU run: what each starts, how long it may take, and the rows it leaves."""

from __future__ import annotations

import json
import operator
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Rows = list[dict[str, Any]]
Arguments = tuple[tuple[str, ...], tuple[str, ...]]
"""A benchmark's on a GPU, and in a dry run."""


@dataclass
class Run:
    """Settings of a stage. `device` is "cuda", or "checked" in a dry run."""

    python: Path
    environ: dict[str, str]
    out: Path
    device: str
    jobs: int
    deadline_s: float = field(default=float("inf"))
    """Deadline of the running stage, on the clock of `time.monotonic`."""

    @property
    def dry(self) -> bool:
        """Returns whether there is no GPU, and everything is tried in its smallest size."""
        return self.device != "cuda"

    def start(self, name: str, *arguments: str, **environ: str) -> Process:
        """Start `python ARGUMENTS` in the tree, with its output in files of that name."""
        with (
            (self.out / f"{name}.out").open("wb") as out,
            (self.out / f"{name}.err").open("wb") as err,
        ):
            process = subprocess.Popen(
                [str(self.python), *arguments],
                cwd=ROOT,
                env={**self.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        return Process(process, self.out / name, self.deadline_s)


class Process:
    """A process of a stage, ended with all that it started when the stage's time is up."""

    def __init__(self, process: subprocess.Popen[bytes], name: Path, deadline_s: float) -> None:
        self._process, self._name, self._deadline_s = process, name, deadline_s

    def wait(self) -> int | None:
        """Its exit code; None where it was ended."""
        try:
            return self._process.wait(max(0.0, self._deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return None

    @property
    def output(self) -> str:
        """Returns what it wrote to standard output."""
        return self._name.with_suffix(".out").read_text(encoding="utf-8", errors="replace")

    def last_words(self) -> str:
        """The end of what it wrote to standard error, or else to standard output."""
        errors = self._name.with_suffix(".err").read_text(encoding="utf-8", errors="replace")
        return (errors.strip() or self.output)[-2000:]


@dataclass(frozen=True)
class Stage:
    """Example: `STAGES["doctor"].run(run)` gives its rows and what it said."""

    budget_s: float
    run: Callable[[Run], tuple[Rows, str]]


def doctor(run: Run) -> tuple[Rows, str]:
    """List what would be applied with CUDA present."""
    process = run.start("doctor", "-m", "megatron_idempotent", "doctor", "--json")
    code = process.wait()
    if code is None or not process.output:
        return [{"test": "doctor", "outcome": "failed"}], process.last_words()
    found = json.loads(process.output)
    counts: dict[str, int] = {}
    for row in found:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    rows: Rows = [{"status": status, "patches": number} for status, number in counts.items()]
    return [*rows, {"test": "doctor", "outcome": "failed" if code else "passed"}], ""


def prove(run: Run) -> tuple[Rows, str]:
    """Each hazard's reproduction, stock and patched, in several processes at once."""
    asked = run.start(
        "affected",
        "-c",
        "from megatron_idempotent.proof.prove import affected; print('\\n'.join(affected()))",
    )
    asked.wait()
    ids = asked.output.split()
    if run.dry:
        ids = [one for one in ids if one in ("no-sync-func-reentry", "params-stale-after-step")]
    jobs = min(run.jobs, len(ids))
    processes = []
    for number in range(jobs):
        arguments = ("prove", "--device", run.device, "--json", *ids[number::jobs])
        processes.append(run.start(f"prove-{number}", "-m", "megatron_idempotent", *arguments))
    rows: Rows = []
    said = ""
    for number, process in enumerate(processes):
        if process.wait() is None or not process.output.strip():
            rows += [{"id": one, "verdict": "out of time"} for one in ids[number::jobs]]
            said = process.last_words()
        else:
            rows += json.loads(process.output)
    if not rows:
        return [{"id": "-", "verdict": "nothing was proven"}], asked.last_words()
    return sorted(rows, key=lambda row: str(row["id"])), said


#: Suites of the tree that take a device, and what of them one GPU cannot run.
SUITES = (
    "tests/gpu",
    "tests/logprobs/test_on_gpu.py",
    "tests/parity/test_train_again.py",
    "tests/step/test_programs.py",
    "tests/patches/test_full_cuda_graph.py",
    "tests/patches/test_guarded_window.py",
    "tests/patches/test_offload.py",
    "tests/patches/test_process_groups.py",
)
DESELECTED = (
    # Ranks that share a GPU wait for each other on the host, which no graph can capture.
    "tests/patches/test_full_cuda_graph.py::test_a_new_wrapper_alone_keeps_the_graph",
)
DRY_SUITES = (
    "tests/gpu",
    "tests/parity/test_train_again.py::test_three_calls_of_two_iterations_equal_one_call_of_six",
)


def suites(run: Run) -> tuple[Rows, str]:
    """Tests, each with its outcome, also of a run that is out of time."""
    outcomes = run.out / "outcomes.jsonl"
    outcomes.unlink(missing_ok=True)
    process = run.start(
        "suites",
        *("-m", "pytest", "-p", "gpu_outcomes", "-q", "-n", str(run.jobs), "--dist", "worksteal"),
        # Plugins that such a machine may have, and that warn where they meet xdist.
        *("-p", "no:benchmark", "-p", "no:jaxtyping", "-p", "no:cov"),
        *("-m", "not exhaustive and not matrix", "--megatron-device", run.device),
        *(f"--deselect={one}" for one in DESELECTED),
        *("-o", f"cache_dir={run.out / 'pytest'}"),
        *(DRY_SUITES if run.dry else SUITES),
        GPU_OUTCOMES=str(outcomes),
        # This run must not start itself.
        GPU_RUN="1",
    )
    code = process.wait()
    lines = outcomes.read_text(encoding="utf-8").splitlines() if outcomes.exists() else []
    rows: Rows = [json.loads(line) for line in lines]
    if code is None:
        rows.append({"test": "the rest", "outcome": "out of time"})
    elif code and all(row["outcome"] in ("passed", "skipped") for row in rows):
        rows.append({"test": "pytest", "outcome": "failed", "why": f"exit code {code}"})
    return rows, "" if code == 0 else process.last_words()


#: Benchmark → its arguments on a GPU, and in a dry run.
BENCHMARKS = {
    "patched_step": (
        ("--rounds", "8", "--seconds", "45"),
        ("--rounds", "2", "--ranks", "1", "--hidden", "64"),
    ),
    "split_step": (
        ("--rounds", "6", "--seconds", "45"),
        ("--device", "checked", "--rounds", "2", "--hidden", "128", "--sequence", "8"),
    ),
    "weight_sync": (("--seconds", "30"), ("--rounds", "1", "--hidden", "128", "--streams", "2")),
    "weight_deltas": ((), ("--device", "checked", "--rounds", "1")),
    "weight_transports": (("--megabytes", "512"), ("--rounds", "1", "--megabytes", "1")),
}
KERNELS = {
    "token_logprobs": (
        (),
        ("--rounds", "1", "--tokens", "64", "--vocabulary", "512", "--only", "from logits"),
    ),
    "weight_export": ((), ("--rounds", "1", "--megabytes", "1", "--bucket-megabytes", "1")),
}


def benchmarks(of: Mapping[str, Arguments], run: Run) -> tuple[Rows, str]:
    """Each benchmark's numbers, and whether they are within their aims; one after the other."""
    rows: Rows = []
    said = ""
    device = "cpu" if run.dry else "cuda"
    for name, (usual, smallest) in of.items():
        arguments = (f"benchmarks.{name}", "--device", device, "--json")
        process = run.start(name, "-m", *arguments, *(smallest if run.dry else usual))
        code = process.wait()
        if code != 0 or not process.output.strip():
            outcome = "out of time" if code is None else "failed"
            rows.append({"benchmark": name, "number": "-", "outcome": outcome})
            said = process.last_words()
        # Each line of a benchmark that prints several holds those before it; the last may be cut.
        whole = [line for line in process.output.splitlines(keepends=True) if line.endswith("\n")]
        if whole:
            rows += _numbers(name, json.loads(whole[-1]))
    return rows, said


_AIMS = {"at_most": ("<=", operator.le), "at_least": (">=", operator.ge)}


def _numbers(benchmark: str, found: Any, path: str = "") -> Iterable[dict[str, Any]]:
    """A row per number of a benchmark's JSON; `benchmarks._device.aim` makes those with an aim."""
    aims = _AIMS.keys() & found.keys() if isinstance(found, dict) else ()
    if aims:
        (aim,) = aims
        sign, holds = _AIMS[aim]
        yield {
            "benchmark": benchmark,
            "number": path,
            "value": found["value"],
            "aim": f"{sign} {found[aim]:g}",
            "outcome": "ok" if holds(found["value"], found[aim]) else "missed",
        }
    elif isinstance(found, dict):
        for name, value in found.items():
            yield from _numbers(benchmark, value, f"{path}, {name}" if path else str(name))
    elif isinstance(found, list):
        # Rows of a table, which are told apart by what is no measurement. A list of numbers has
        # single measurements, whose median stands elsewhere.
        for each in found:
            if not isinstance(each, dict):
                continue
            texts = [text for text in each.values() if isinstance(text, str)]
            label = ", ".join([*texts, *(f"{each[n]} {n}" for n in ("tokens",) if n in each)])
            yield from _numbers(benchmark, each, f"{path}: {label}" if path else label)
    elif isinstance(found, (int, float)):
        yield {"benchmark": benchmark, "number": path, "value": found, "aim": "", "outcome": "ok"}


STAGES = {
    "doctor": Stage(30.0, doctor),
    "prove": Stage(200.0, prove),
    "suites": Stage(300.0, suites),
    "benchmarks": Stage(420.0, partial(benchmarks, BENCHMARKS)),
    "kernels": Stage(300.0, partial(benchmarks, KERNELS)),
}
