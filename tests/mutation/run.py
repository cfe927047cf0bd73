"""Put one fault at a time into a copy of the project, and see that its tests fail.

    python tests/mutation/run.py [--jobs 2] [ID ...]

`mutants.json` holds the list. A mutant is a line of a file as it is and as it would be, and the
tests that failed with it when the list was made. The copy lies in a temporary folder, so that an
interrupted run leaves nothing in the checkout. First all these tests run on a copy without a fault:
one that fails there catches nothing. Takes about half a minute per mutant and job; exit code 1
where a mutant survives, or no longer fits its file, or where the tests that `make test` runs catch
fewer than 95 % of those that all tests catch: then a file moves back from the full tier.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from editable import environ_of  # noqa: E402

MUTANTS = Path(__file__).with_name("mutants.json")
#: The least share of the caught mutants that the default tier has to catch, too.
DEFAULT_TIER = 0.95
#: How a file says that `make test` leaves it out.
FULL = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.full", re.MULTILINE)
#: A mutant that hangs is caught by a deadline, of a test or this one.
TIMEOUT_S = 900


def copy_of_the_project(target: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def mutated(text: str, mutant: dict[str, Any]) -> str | None:
    """The file with the fault; None where the line is not there, or not once."""
    before, after = mutant["before"], mutant["after"]
    return text.replace(before, after) if text.count(before) == 1 else None


def by_default(mutant: dict[str, Any]) -> bool:
    """Tell whether `make test` runs a test that catches the mutant."""
    files = {ROOT / test.partition("::")[0] for test in mutant["caught_by"]}
    return not all(FULL.search(file.read_text(encoding="utf-8")) for file in files)


def verdict(tree: Path, mutant: dict[str, Any], tests: list[str]) -> str:
    """Run tests with the mutant in place: `caught`, `survived` or `moved`."""
    file = tree / mutant["file"]
    text = file.read_text(encoding="utf-8")
    changed = mutated(text, mutant)
    if changed is None:
        return "moved"
    file.write_text(changed, encoding="utf-8")
    try:
        return "caught" if fails(tree, tests) else "survived"
    finally:
        file.write_text(text, encoding="utf-8")


def fails(tree: Path, tests: list[str]) -> bool:
    finder = tree.with_name(f"{tree.name}-finder")
    env = {**os.environ, **environ_of(tree, finder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return True
    if process.returncode in (4, 5):
        raise SystemExit(f"{' '.join(tests)}: no such tests\n{said[-2000:]}")
    return process.returncode != 0


def judged(mutants: list[dict[str, Any]], jobs: int) -> Iterator[tuple[dict[str, Any], str]]:
    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for number in range(jobs):
            tree = Path(folder) / str(number)
            copy_of_the_project(tree)
            trees.put(tree)
        tests = sorted({test for mutant in mutants for test in mutant["caught_by"]})
        if fails(tree, tests):
            raise SystemExit("some of these tests fail without a fault: run them, and mend that")

        def judge(mutant: dict[str, Any]) -> str:
            tree = trees.get()
            try:
                return verdict(tree, mutant, mutant["caught_by"])
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(jobs) as pool:
            yield from zip(mutants, pool.map(judge, mutants), strict=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ids", nargs="*", help="of mutants; all without any")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    mutants = json.loads(MUTANTS.read_text(encoding="utf-8"))
    if unknown := set(asked.ids) - {mutant["id"] for mutant in mutants}:
        parser.error(f"{MUTANTS.name} has no {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in mutants if not asked.ids or mutant["id"] in asked.ids]
    caught = []
    for mutant, outcome in judged(chosen, asked.jobs):
        line = f"{mutant['id']:8} {outcome:9} {mutant['file']}: {mutant['after'].strip()}"
        print(line, flush=True)
        caught += [mutant] if outcome == "caught" else []
    default = sum(map(by_default, caught))
    print(f"{len(caught)} of {len(chosen)} caught, {default} of them by the default tier")
    honest = bool(asked.ids) or default >= DEFAULT_TIER * len(caught)
    return 0 if len(caught) == len(chosen) and honest else 1


if __name__ == "__main__":
    sys.exit(main())
