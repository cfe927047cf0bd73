"""Runs on one source tree what the proof of a repair compares; `tools/repairs.py` calls it.

    python tools/repair_proof.py TREE RESULT ID… [--unit-tests FILE…] [--programs]

TREE has to be first on PYTHONPATH. RESULT gets a pickle of a `Result`'s fields.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _checkout import ROOT
from repairs import Result

from megatron_idempotent.patching.api import apply
from megatron_idempotent.patching.catalog import hazards
from megatron_idempotent.proof.cpu import PROGRAM_PRELOAD, RankError, RankPool, RankTimeout, program
from megatron_idempotent.proof.prove import DEADLINE_S, outcome

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


def bits_of_control(hazard_id: str) -> object:
    """Run a hazard's `control`, a correct program that resembles the hazard's reproduction, on
    this rank without patches. Return the values to compare.
    """
    run = hazards()[hazard_id].control
    assert run is not None
    return run()


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


def on_ranks(pool: RankPool, ranks: int, function: Any, *arguments: Any) -> Any:
    """Run a function on ranks of the pool, and return all ranks' results.
    If a rank raises an error, or does not end in time, return the error's text.
    """
    try:
        return pool.run(ranks, function, *arguments, timeout_s=DEADLINE_S, patience=3)
    except RankError as error:
        return f"{error.exception_type.rpartition('.')[2]}: {error.message}"
    except RankTimeout as error:
        return f"RankTimeout: no end within {error.timeout_s:g} s"


def run_trainings(pool: RankPool) -> dict[str, str]:
    """Compare three calls of `train(2)` with one of `train(6)` in each layout of `TRAININGS`.
    Return `ok`, `other bits` or an error's text, by layout.
    """
    outcomes = {}
    for name, (ranks, *options) in TRAININGS.items():
        once = on_ranks(pool, ranks, trained, *options, 1)
        in_parts = on_ranks(pool, ranks, trained, *options, 3)
        errors = [result for result in (once, in_parts) if isinstance(result, str)]
        outcomes[name] = errors[0] if errors else "ok" if once == in_parts else "other bits"
    return outcomes


def run_programs(pool: RankPool) -> dict[str, Any]:
    """Run the programs of tests/parity/test_no_hazard.py without patches; return their results."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "parity")]
    tests = importlib.import_module("test_no_hazard")

    results = {
        str(layout): on_ranks(pool, layout.ranks, tests.windows, layout, False)
        for layout in tests.LAYOUTS
    }
    for options in ((), ("--overlap-grad-reduce", "--overlap-param-gather")):
        results["train " + " ".join(options)] = on_ranks(pool, 2, tests.train, options, False)
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
    os.environ["PYTHONPATH"] = os.pathsep.join([str(arguments.tree), str(ROOT)])
    with RankPool(4, preload=(*PROGRAM_PRELOAD, "pytest"), stdout=2) as pool:
        for hazard_id in arguments.ids:
            hazard = hazards()[hazard_id]
            result.reproductions[hazard_id] = outcome(pool.run, hazard_id, applied=())
            if hazard.control is not None:
                bits = on_ranks(pool, hazard.ranks, bits_of_control, hazard_id)
                result.controls[hazard_id] = bits
        from unit_tests import outcomes

        for test in arguments.unit_tests:
            ranks, _, file = test.partition(":")
            result.unit_tests[file] = outcomes(
                pool, int(ranks), arguments.tree.resolve(), file, False, 240.0
            )
        if arguments.programs:
            result.programs = run_programs(pool)
        if arguments.trainings:
            result.trainings = run_trainings(pool)
    arguments.result.write_bytes(pickle.dumps(asdict(result)))


if __name__ == "__main__":
    main()
