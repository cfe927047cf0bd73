"""Makes, shows and proves upstream's own repairs of hazards, which are edits in upstream/ID.

    python tools/repairs.py apply CLONE [ID…]
    python tools/repairs.py diff CLONE ID
    python tools/repairs.py prove CLONE [ID…] [--together] [--all]

CLONE is a checkout of Megatron-LM, or of another folder that has the packages. `apply` edits it in
place, and prints a line per repair; `diff` and `prove` leave it as it is. Without ids, all repairs
whose packages CLONE has. The exit code is 1 if an anchor is missing, or a proof fails.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib.util
import itertools
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _checkout import ROOT

from megatron_idempotent.cli.upstream import FOLDER, repair_folder
from upstream.edits import AnchorError, Repair, file_of


@dataclass(kw_only=True, slots=True)
class Result:
    """Holds the outcomes of all that a proof of repairs ran on one tree, stock or repaired."""

    statuses: dict[str, str] = field(default_factory=dict)
    """The status that `apply()` gives each patch."""
    reasons: dict[str, str] = field(default_factory=dict)
    """The reason for the status, by patch."""
    reproductions: dict[str, str] = field(default_factory=dict)
    """`ok`, or the error, of each named hazard's reproduction without patches."""
    controls: dict[str, Any] = field(default_factory=dict)
    """The bits, or the error, of each named hazard's control without patches."""
    unit_tests: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """The outcomes on each rank, by file of upstream's unit tests and by test."""
    programs: dict[str, Any] = field(default_factory=dict)
    """The bits and collectives of programs without a hazard, by name."""
    trainings: dict[str, str] = field(default_factory=dict)
    """`ok`, or how three calls `train(2)` differ from one `train(6)`, by layout."""


@functools.cache
def repair_of(hazard_id: str) -> Repair:
    """Return the `Repair` that upstream/ID/repair.py declares for a hazard.

    Raises:
        SystemExit: upstream/ has none.
    """
    folder = repair_folder(hazard_id)
    if folder is None:
        known = ", ".join(repaired())
        raise SystemExit(f"no repair of {hazard_id} in upstream/; there are: {known}")
    name = f"repair_{hazard_id}"
    spec = importlib.util.spec_from_file_location(name, folder / "repair.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    repair: Repair = module.REPAIR
    return repair


def repaired() -> list[str]:
    """Return the sorted ids of the hazards for which upstream/ has a repair."""
    return sorted(path.parent.name for path in FOLDER.glob("*/repair.py"))


def in_order(ids: Iterable[str]) -> list[str]:
    """Return these hazards, and those that their repairs build on, in the order of repairing.
    A hazard comes after all that its own repair builds on.
    """
    order: list[str] = []

    def add(hazard_id: str) -> None:
        for earlier in repair_of(hazard_id).after:
            add(earlier)
        if hazard_id not in order:
            order.append(hazard_id)

    for hazard_id in ids:
        add(hazard_id)
    return order


def chosen(clone: Path, ids: list[str]) -> list[str]:
    """Return the hazards `ids`.
    If `ids` is empty, return all hazards whose repairs edit only packages that the clone has.

    A package counts with its first folder, because `megatron.core` and `megatron.bridge` are in
    different repositories.
    """
    if ids:
        return ids

    def is_in_clone(module: str) -> bool:
        base = clone.joinpath(*module.split(".")[:2])
        return base.is_dir() or base.with_suffix(".py").is_file()

    return [
        hazard_id
        for hazard_id in repaired()
        if all(is_in_clone(edit.module) for edit in repair_of(hazard_id).edits)
    ]


def is_made(repair: Repair, root: Path) -> bool:
    """Return whether the checkout's files already contain all that the repair inserts: the lines of
    each edit next to each other, and the text of each substitution.
    """
    for edit in repair.edits:
        text = file_of(edit.module, root).read_text("utf-8")
        if edit.action == "substitute":  # its text is a part of a line
            if edit.lines not in text:
                return False
            continue
        present = _stripped(text)
        blocks = [block for block in (_stripped(edit.lines), _stripped(edit.tail)) if block]
        if not all(_has(present, block) for block in blocks):
            return False
    return True


def _stripped(text: str) -> list[str]:
    """Return the lines of a text without indentation, and without blank lines."""
    return [line.strip() for line in text.split("\n") if line.strip()]


def _has(lines: list[str], block: list[str]) -> bool:
    """Tell if the lines of a block follow each other in `lines`."""
    starts = range(len(lines) - len(block) + 1)
    return any(lines[start : start + len(block)] == block for start in starts)


def write(path: Path, text: str) -> None:
    """Replace a file by a new one with this text, so that a hard link to the old file in another
    tree keeps the old text.
    """
    half = path.with_name(f"{path.name}.new")
    half.write_text(text, "utf-8")
    half.replace(path)


def make(root: Path, ids: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Edit the files of a checkout by repairs.
    Yield (hazard's id, `applied` or `already applied`), or the id and a sentence about what is
    missing.

    A repair that does not fit changes no file.
    """
    for hazard_id in in_order(ids):
        repair = repair_of(hazard_id)
        try:
            if is_made(repair, root):
                yield hazard_id, "already applied"
                continue
            for path, text in repair.files(root).items():
                write(path, text)
        except AnchorError as error:
            yield hazard_id, str(error)
        else:
            yield hazard_id, "applied"


def diff(root: Path, hazard_id: str) -> str:
    """Return, as a unified diff, what a repair changes in a checkout; the checkout stays as it is.

    Repairs that this one builds on are made first, and are no part of the diff.

    Raises:
        AnchorError: an edit does not fit.
    """
    texts: dict[Path, str] = {}
    for earlier in in_order([hazard_id])[:-1]:
        texts |= repair_of(earlier).files(root, texts)
    lines: list[str] = []
    for path, text in repair_of(hazard_id).files(root, texts).items():
        name = path.relative_to(root)
        sides = (texts[path] if path in texts else path.read_text("utf-8"), text)
        before, after = (side.splitlines(keepends=True) for side in sides)
        lines += difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(lines)


def changed_lines(difference: str) -> int:
    """Return how many lines a diff changes: the larger of the numbers of added and removed lines.
    Lines that are only indented do not count.
    """
    added, removed = (
        [line[1:].strip() for line in difference.splitlines() if line.startswith(sign)]
        for sign in ("+", "-")
    )
    moved = list(removed)
    count = 0
    for line in added:
        if line in moved:
            moved.remove(line)
        elif line and not line.startswith("++ b/"):
            count += 1
    return max(count, sum(1 for line in moved if line and not line.startswith("-- a/")))


def copied(clone: Path, tree: Path) -> Path:
    """Copy a checkout, without its `.git`, to the folder `tree`, and return `tree`.
    The files are hard links where the file system allows it.
    """
    try:
        shutil.copytree(clone, tree, copy_function=os.link, ignore=shutil.ignore_patterns(".git"))
    except (OSError, shutil.Error):
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(clone, tree, ignore=shutil.ignore_patterns(".git"))
    return tree


def ready_to_run(tree: Path) -> Path:
    """Copy the compiled helper of the installed Megatron into a tree, so that the tree does not
    compile its own. Return the tree.
    """
    datasets = tree / "megatron" / "core" / "datasets"
    if datasets.is_dir():
        spec = importlib.util.find_spec("megatron.core")
        assert spec is not None
        assert spec.submodule_search_locations
        for library in Path(spec.submodule_search_locations[0]).glob("datasets/helpers_cpp*.so"):
            (datasets / library.name).unlink(missing_ok=True)
            shutil.copy2(library, datasets / library.name)
        write(datasets / "Makefile", "all:\n\ttrue\n")
    return tree


def unit_test(hazard_id: str) -> str:
    """Return the file name that a repair's own unit test gets in a tree's tests/unit_tests."""
    return f"test_repair_{hazard_id.replace('-', '_')}.py"


def run(tree: Path, arguments: list[str]) -> Result:
    """Run tools/repair_proof.py on a tree in another process, after copying the repairs' unit tests
    into the tree. Return its `Result`.
    """
    tests = tree / "tests" / "unit_tests"
    tests.mkdir(parents=True, exist_ok=True)
    for name in ("train_utilities.py", "framework_utilities.py"):
        shutil.copy2(FOLDER / name, tests / name)
    for hazard_id in repaired():
        shutil.copy2(FOLDER / hazard_id / "test_repair.py", tests / unit_test(hazard_id))
    file = tree.with_name(f"{tree.name}.pickle")
    env = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_ID")}
    env |= {"PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools" / "repair_proof.py")]
    command += [str(tree), str(file), *arguments]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout.decode(errors='replace')[-4000:]}")
    return Result(**pickle.loads(file.read_bytes()))


def faults(
    hazard_id: str, stock: Result, mended: Result, made: Iterable[str] | None = None
) -> Iterator[str]:
    """Yield a sentence for each fault of a repair.
    Faults are found by comparing the results on the stock tree with those on the repaired tree.

    Args:
        hazard_id: the hazard.
        stock: the results on the stock tree.
        mended: the results on the repaired tree.
        made: the hazards of all repairs in the repaired tree; None for this one, with those that
            it builds on.
    """
    repair = repair_of(hazard_id)
    for repaired_id in (hazard_id, *repair.also):
        status = mended.statuses.get(repaired_id, "")
        if stock.reproductions[repaired_id] == "ok":
            yield f"{repaired_id} is not there before the repair"
        if mended.reproductions[repaired_id] != "ok":
            yield f"{repaired_id} is still there: {mended.reproductions[repaired_id]}"
        if repaired_id in stock.statuses and not _is_right(status, repair):
            yield f"apply() says {status} of {repaired_id}: {mended.reasons[repaired_id]}"
        before_bits = stock.controls.get(repaired_id)
        if isinstance(before_bits, str):
            yield f"the correct program beside {repaired_id} fails on stock: {before_bits}"
        if before_bits != mended.controls.get(repaired_id):
            yield f"the correct program beside {repaired_id} has other bits"
    in_tree = list(in_order([hazard_id]) if made is None else made)
    repairs = list(map(repair_of, in_tree))
    ended = {*in_tree, *itertools.chain(*(other.also for other in repairs))}
    changed = {*itertools.chain(*(other.rereads for other in repairs))}
    for patch_id in sorted({*repair.rereads} - ended):
        if mended.statuses[patch_id] != "drifted":
            yield f"{patch_id} is in rereads=, but `apply()` says {mended.statuses[patch_id]} of it"
    yield from changed_statuses(stock, mended, ended | changed)
    own = unit_test(hazard_id)
    for file, after in mended.unit_tests.items():
        if file.startswith("test_repair_") and file != own:
            continue
        before = stock.unit_tests.get(file, {})
        if file != own:
            for test in sorted(before.keys() | after.keys()):
                # What failed before, or was cut off by its deadline, may pass after the repair.
                is_passed = set(after.get(test, ())) == {"passed"}
                if before.get(test) != after.get(test) and not is_passed:
                    # A file is cut off where its rank died, or its deadline passed.
                    outcomes = [tree.get(test) or "cut off" for tree in (before, after)]
                    yield f"{test}: {outcomes[0]} before, {outcomes[1]} after"
        else:
            after_outcomes = set(itertools.chain(*after.values()))
            failed_before = any(o.startswith("failed") for o in itertools.chain(*before.values()))
            if file in stock.unit_tests and not failed_before:
                yield f"its unit test does not fail before the repair: {before}"
            if after_outcomes != {"passed"}:
                yield f"its unit test does not pass after the repair: {after}"
    for name, before_bits in stock.programs.items():
        if isinstance(before_bits, str):
            yield f"program {name} fails on stock: {before_bits}"
        if before_bits != mended.programs[name]:
            yield f"program {name} has other bits or collectives"


def _is_right(status: str, repair: Repair) -> bool:
    """Return whether `apply()` may give a repaired hazard's patch this status.
    With `Repair.leaves` it still has to install or refuse the patch; else the patch has to be
    `fixed_upstream`.
    """
    return status in ("applied", "drifted") if repair.leaves else status == "fixed_upstream"


def changed_statuses(stock: Result, mended: Result, but: set[str]) -> Iterator[str]:
    """Yield a sentence for each patch outside of `but` to which `apply()` gives another status on
    the repaired tree than on the stock tree.
    """
    for patch_id, status in stock.statuses.items():
        if patch_id not in but and mended.statuses[patch_id] != status:
            reason = mended.reasons[patch_id]
            yield f"apply() says {mended.statuses[patch_id]} of {patch_id}, not {status}: {reason}"


def prove(clone: Path, ids: list[str], *, together: bool, everything: bool) -> int:
    """Prove repairs: compare what tests give on the stock tree and on the repaired tree.
    Print the faults of each repair; return 1 if there are any, else 0.

    Args:
        clone: the checkout.
        ids: the hazards.
        together: make all of these repairs in one copy of the checkout, and train there in three
            calls, too; otherwise each repair gets a copy of its own.
        everything: also run upstream's own unit tests of what is edited, and programs without a
            hazard, before and after.
    """
    with tempfile.TemporaryDirectory(dir=os.environ.get("REPAIRS_TMP")) as folder:
        plain = ready_to_run(copied(clone, Path(folder) / "stock"))
        if together:
            name = f"all {len(ids)} together"
            return _print_proof(name, _faults_together(plain, ids, everything))
        stock = run(plain, _arguments(ids, everything))

        def proof(hazard_id: str) -> list[str]:
            tree = copied(plain, Path(folder) / hazard_id)
            unmade = [f"{i}: {o}" for i, o in make(tree, [hazard_id]) if o != "applied"]
            if unmade:
                return unmade
            mended = run(tree, _arguments([hazard_id], everything))
            shutil.rmtree(tree)
            return list(faults(hazard_id, stock, mended))

        failed = 0
        with ThreadPoolExecutor(int(os.environ.get("REPAIRS_JOBS", "2"))) as threads:
            for hazard_id, wrong in zip(ids, threads.map(proof, ids), strict=True):
                count = "" if wrong else f" ({changed_lines(diff(clone, hazard_id))} lines)"
                failed |= _print_proof(f"{hazard_id}{count}", wrong)
    return failed


def _arguments(ids: Iterable[str], everything: bool, *, own_tests: bool = True) -> list[str]:
    """Return the arguments of tools/repair_proof.py that come after its tree and its result file.
    Without `own_tests`, the repairs' own unit tests are left out.
    """
    repairs = {name: repair_of(name) for name in ids}
    hazards = [h for name, repair in repairs.items() for h in (name, *repair.also)]
    tests = {f"{r.ranks}:{unit_test(name)}": None for name, r in repairs.items() if own_tests}
    if everything:
        tests |= {f"2:{file}": None for r in repairs.values() for file in r.unit_tests}
    more = ["--programs"] if everything else []
    return [*hazards, "--unit-tests", *tests, *more]


def _faults_together(plain: Path, ids: list[str], everything: bool) -> list[str]:
    """Make all repairs in one copy of the tree `plain`, and return a sentence for each fault.
    A fault is also a training in three calls of `train()` that differs from one in a single call.
    """
    tree = copied(plain, plain.with_name("together"))
    wrong = [f"{i}: {o}" for i, o in make(tree, ids) if o != "applied"]
    # Where a test fails on one rank the others wait: that each fails on stock is proven alone.
    stock = run(plain, _arguments(ids, everything, own_tests=False))
    mended = run(tree, [*_arguments(ids, everything), "--trainings"])
    for hazard_id in ids:
        wrong += faults(hazard_id, stock, mended, in_order(ids))
    wrong += [f"training {n}: {o}" for n, o in mended.trainings.items() if o != "ok"]
    return list(dict.fromkeys(wrong))


def _print_proof(name: str, wrong: list[str]) -> int:
    """Print a line for a proof, and a line for each fault; return 1 if there is a fault, else 0."""
    print(f"{name}: {'FAILED' if wrong else 'proven'}", flush=True)
    for line in wrong:
        print(f"    {line}", flush=True)
    return 1 if wrong else 0


def main() -> int:
    """Run the command `apply`, `diff` or `prove` that the command line names, and return the exit
    code.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, many in (("apply", "*"), ("diff", 1), ("prove", "*")):
        command = commands.add_parser(name)
        command.add_argument("clone", type=Path)
        command.add_argument("ids", nargs=many, metavar="ID")
        if name == "prove":
            command.add_argument("--together", action="store_true", help="all in one tree")
            command.add_argument(
                "--all", action="store_true", help="upstream's tests and programs, too"
            )
    arguments = parser.parse_args()
    clone = arguments.clone.resolve()
    if not clone.is_dir():
        parser.error(f"{arguments.clone} is no folder")
    ids = chosen(clone, arguments.ids)
    for hazard_id in ids:
        repair_of(hazard_id)
    if arguments.command == "apply":
        outcomes = list(make(clone, ids))
        for hazard_id, outcome in outcomes:
            print(f"{hazard_id}: {outcome}")
        return 0 if all(outcome.endswith("applied") for _, outcome in outcomes) else 1
    if arguments.command == "diff":
        try:
            print(diff(clone, ids[0]), end="")
        except AnchorError as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    return prove(clone, ids, together=arguments.together, everything=arguments.all)


if __name__ == "__main__":
    sys.exit(main())
