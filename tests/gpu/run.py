"""One command for a machine with an NVIDIA GPU and no network; `make test-gpu` runs it.

    python3 tests/gpu/run.py [--stages doctor,prove,suites,benchmarks,kernels] [--limit-s S] [--dry]

It makes an environment on top of the given Python, whose torch is used, from the folder that `make
wheels` filled, and runs its stages. report.json and report.md in --out are complete after each
stage, whatever fails; stages that an earlier call ran on the same machine stay in them, so that
several short calls make one report.

Exit code: 0 where all stages passed; 1 where one did not; 3 without a GPU, where nothing is done.
`--dry` goes every step up to the device, on a CPU that refuses what a GPU would refuse.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import gpu_environment  # noqa: E402  beside this file, and started by path
from gpu_report import NAMES, Report, all_good  # noqa: E402
from gpu_stages import STAGES, Run  # noqa: E402

NO_GPU = 3


def main() -> int:
    """Look, make the environment, run the stages; return the exit code."""
    asked = _parser().parse_args()
    machine = gpu_environment.look(asked.python)
    why_not = None if asked.dry else machine.why_not()
    if why_not is not None:
        print(why_not)
        return NO_GPU
    device = "checked" if asked.dry else "cuda"
    started = time.monotonic()
    asked.work.mkdir(parents=True, exist_ok=True)
    python = gpu_environment.make(asked.python, machine, asked.wheels, asked.work / "venv")
    print(f"environment: {time.monotonic() - started:.0f} s, on {asked.python}", flush=True)
    facts = machine.facts | gpu_environment.versions(asked.wheels)
    out = asked.out or asked.work
    report = Report(out, facts, dry=asked.dry)
    run = Run(
        python=python,
        environ=gpu_environment.environ(ROOT, device),
        out=asked.work.absolute(),
        device=device,
        jobs=asked.jobs,
    )
    for name in asked.stages:
        stage = STAGES[name]
        left_s = asked.limit_s - (time.monotonic() - started)
        budget_s = min(stage.budget_s, left_s)
        if budget_s <= 5.0:
            report.stage(name, outcome="not run: no time is left", seconds=0.0, rows=[])
            continue
        began = time.monotonic()
        run.deadline_s = began + budget_s
        try:
            rows, said = stage.run(run)
        except Exception as error:  # noqa: BLE001  the report and the other stages go on
            rows, said = [{"test": name, "outcome": "failed"}], repr(error)
        seconds = time.monotonic() - began
        outcome = "passed" if rows and all_good(rows) else "failed"
        report.stage(
            name, outcome=outcome, seconds=seconds, budget_s=budget_s, rows=rows, said=said
        )
        print(f"{name}: {outcome}, {seconds:.0f} s, {len(rows)} rows", flush=True)
    print((out / NAMES["markdown"]).read_text(encoding="utf-8"))
    print(f"written to {out / NAMES['json']} and {out / NAMES['markdown']}")
    return 1 if any(name in report.failed for name in asked.stages) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="holds torch with CUDA")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build" / "wheels")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "gpu", help="environment, logs"
    )
    parser.add_argument("--out", type=Path, help="for the report; default: --work")
    parser.add_argument("--limit-s", type=float, default=1380.0, help="for all stages of this call")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--dry", action="store_true", help="every step up to the device")
    parser.add_argument(
        "--stages",
        type=lambda text: [_stage(name.strip()) for name in text.split(",") if name.strip()],
        default=list(STAGES),
        help=f"of {','.join(STAGES)}",
    )
    return parser


def _stage(name: str) -> str:
    if name not in STAGES:
        raise argparse.ArgumentTypeError(f"{name!r} is no stage; known are {', '.join(STAGES)}")
    return name


if __name__ == "__main__":
    sys.exit(main())
