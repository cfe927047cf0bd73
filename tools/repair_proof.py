"""Runs on one source tree what the proof of a repair compares; `tools/repairs.py` calls it.

    python tools/repair_proof.py TREE RESULT ID… [--unit-tests FILE…] [--programs]

TREE has to be first on PYTHONPATH. RESULT gets a pickle of a `Result`'s fields.
"""

from __future__ import annotations

import argparse
import importlib
import pickle
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _checkout import ROOT
from repairs import Result
from unit_tests import outcomes

from megatron_idempotent.patching import decide
from megatron_idempotent.patching.api import apply
from megatron_idempotent.patching.catalog import hazards, index_entries
from megatron_idempotent.proof.cpu import PROGRAM_PRELOAD, RankPool, program
from megatron_idempotent.proof.prove import control_result, outcome, run_or_error

#: For one file of unit tests, several times what the slowest takes on an idle machine.
_DEADLINE_S = 900.0
_OVERLAPS = ("--overlap-grad-reduce", "--overlap-param-gather")
_STAGES = ("--pipeline-model-parallel-size", "2", "--num-layers", "2")
#: Layouts that train in three calls and in one: ranks, options, and the distributed optimizer.
TRAININGS: dict[str, tuple[int, tuple[str, ...], bool]] = {
    "dp2": (2, (), False),
    "dp2-distopt": (2, (), True),
    "dp2-distopt-overlaps": (2, _OVERLAPS, True),
    "dp2-pp2": (4, _STAGES, False),
    "dp2-pp2-distopt": (4, _STAGES, True),
    "dp2-pp2-distopt-overlaps": (4, (*_STAGES, *_OVERLAPS), True),
}


def trained(
    options: tuple[str, ...], distributed_optimizer: bool, calls: int
) -> tuple[list[float], bytes]:
    """Train for six iterations on this rank, in `calls` calls of Megatron's `train`.
    Return the losses and the parameters' bytes.
    """
    running = program.start(options, distributed_optimizer=distributed_optimizer)
    for _ in range(calls):
        running.train(6 // calls)
    return running.losses, running.parameters().numpy().tobytes()


def run_trainings(pool: RankPool) -> dict[str, str]:
    """Compare three calls of `train(2)` with one of `train(6)` in each layout of `TRAININGS`.
    Return `ok`, `other bits` or an error's text, by layout.
    """
    by_layout = {}
    for name, (ranks, *options) in TRAININGS.items():
        error, at_once = run_or_error(pool.run, ranks, trained, *options, 1)
        later_error, in_parts = run_or_error(pool.run, ranks, trained, *options, 3)
        differ = "ok" if at_once == in_parts else "other bits"
        by_layout[name] = error or later_error or differ
    return by_layout


def run_programs(pool: RankPool) -> dict[str, Any]:
    """Run the programs of tests/parity/test_no_hazard.py without patches.
    Return what each rank returns, or the error's text, by program.
    """
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "parity")]
    tests = importlib.import_module("test_no_hazard")

    results = {}
    for layout in tests.LAYOUTS:
        error, bits = run_or_error(pool.run, layout.ranks, tests.windows, layout, False)
        results[str(layout)] = error or bits
    for options in ((), ("--overlap-grad-reduce", "--overlap-param-gather")):
        error, bits = run_or_error(pool.run, 2, tests.train, options, False)
        results["train " + " ".join(options)] = error or bits
    return results


def main() -> None:
    """Run on one source tree the reproductions, tests and programs that the command line names, and
    write a pickle of their `Result`.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tree", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--unit-tests", nargs="*", default=(), metavar="RANKS:FILE")
    parser.add_argument("--programs", action="store_true")
    parser.add_argument("--trainings", action="store_true")
    arguments = parser.parse_args()
    result = Result()
    for row in apply(dry_run=True):
        result.statuses[row.id], result.reasons[row.id] = row.status, row.reason
    for hazard_id in arguments.ids:
        entry = index_entries().get(hazard_id)  # None for a hazard that a helper covers
        if entry is not None and not entry.default:  # `apply()` says only that the patch is off
            verdict = decide.check_bodies(entry, named=False)
            if verdict.status is not None:
                result.statuses[hazard_id] = verdict.status
                result.reasons[hazard_id] = verdict.reason
    with RankPool(4, preload=(*PROGRAM_PRELOAD, "pytest"), stdout=2) as pool:
        for hazard_id in arguments.ids:
            hazard = hazards()[hazard_id]
            result.reproductions[hazard_id] = outcome(pool.run, hazard_id, applied=())
            if hazard.control is not None:
                error, bits = control_result(pool.run, hazard_id, applied=())
                result.controls[hazard_id] = error or bits
        for test in arguments.unit_tests:
            ranks, _, file = test.partition(":")
            result.unit_tests[file] = outcomes(
                pool, int(ranks), arguments.tree.resolve(), file, False, _DEADLINE_S
            )
        if arguments.programs:
            result.programs = run_programs(pool)
        if arguments.trainings:
            result.trainings = run_trainings(pool)
    arguments.result.write_bytes(pickle.dumps(asdict(result)))


if __name__ == "__main__":
    main()
