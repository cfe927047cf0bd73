"""CONTRIBUTING's steps, followed to the letter in a copy of the project."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from editable import environ_of

from megatron_idempotent.patching.base import MEGATRON, untried
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.releases import LANDS, Table, installed
from megatron_idempotent.patching.rows import COVERED, PROBLEMS
from megatron_idempotent.patching.source import locate

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
ROOT = Path(__file__).parents[2]
INFO = "megatron/core/package_info.py"
GENERATED = (
    *("Makefile", "README.md", "HAZARDS.md", "pyproject.toml", "docs/compatibility.md"),
    "docs/use.md",
    *(f"patches/_generated/{name}.txt" for name in ("index", "reads", "reviewed", "accepted")),
    *(f"patches/_generated/{name}.txt" for name in ("releases", "texts")),
)
TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["megatron-idempotent"]
MAJOR, MINOR, _ = map(int, TABLE["releases"][-1]["megatron"].split("."))
#: A release that is not there yet, and the first one after it.
NEXT, BEYOND = f"{MAJOR}.{MINOR + 1}.0", f"{MAJOR}.{MINOR + 2}"
ENTRY = f"""
[[tool.megatron-idempotent.releases]]
megatron = "{NEXT}"
python = "3.12"
also = ["3.13"]
training = true
requires = []
"""
#: What adding a case file can turn red, less what starts a program per layout or per case file.
SUITES = (
    *("tests/packaging", "tests/tools/test_generated_files.py"),
    *("tests/cli/test_drift.py", "tests/cli/test_accept.py"),
    *("tests/cli/test_doctor_and_explain.py", "tests/patching/test_case_files.py"),
    *("tests/patching/test_index.py", "tests/patching/test_statuses.py"),
    *("tests/patching/fuzz/test_pinned.py", "tests/site/test_start.py"),
    "--deselect=tests/packaging/test_contributing.py",
)

#: Two small patches of one function, which another patch wraps too. One names what it relies on.
CASE = '''"""The same random state cannot be added again{title}.

Symptom:
    `Exception: {error}` from `CudaRNGStatesTracker.add`, where a program sets up its random states
    for a second time.

Cause:
    `add` refuses what is there already, also where it is the same again.

Affects:
    Every release. What the patch does: the second `add` leaves things as they are.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/tensor_parallel/random.py,
    `CudaRNGStatesTracker.add`.

Remove when:
    `add` takes the same state again.
"""

from __future__ import annotations

from typing import Any

from ._case import Original, Patch, target


def add(original: Original, self: Any, name: str, seed: int) -> None:
    """Do nothing where the state is there."""
    if not ({there}):
        original(self, name, seed)


def reproduce() -> None:
    """Add {title} again."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("mine", 1)
    tracker.add("mine", {second})


PATCH = Patch(
    "the same random state cannot be added again{title}",
    target("random.CudaRNGStatesTracker.add", add{relies_on}),
    ranks=1,
    stock_error=r"Exception: {error}",
)
'''
SAMPLES = {
    "same-seed-refused": CASE.format(
        title=", with its seed",
        error="seed 1 already exists",
        there="name in self.states_ and seed in self.seeds_",
        second=1,
        relies_on="",
    ),
    "same-state-refused": CASE.format(
        title=", with another seed",
        error="cuda rng state mine already exists",
        there="name in self.states_ and seed not in self.seeds_",
        second=2,
        relies_on=', "self.seeds_.add(seed)"',
    ),
}


class Project:
    """A copy of this project, which programs import in the place of the installed one."""

    def __init__(self, folder: Path) -> None:
        ignored = (ROOT / ".gitignore").read_text().split()
        leave = shutil.ignore_patterns(".git", *(name.strip("/") for name in ignored))
        shutil.copytree(ROOT, folder, ignore=leave)
        self.folder = folder
        self.before: list[str] = []

    def run(self, *command: str, code: int = 0) -> str:
        env = {k: v for k, v in os.environ.items() if not k.startswith("MEGATRON_IDEMPOTENT")}
        env |= environ_of(self.folder, self.folder.with_name("finder"), *self.before)
        done = subprocess.run(
            [sys.executable, *command], cwd=self.folder, env=env, capture_output=True, text=True
        )
        assert done.returncode == code, done.stdout[-6000:] + done.stderr[-6000:]
        return done.stdout

    def ours(self, *arguments: str, code: int = 0) -> str:
        return self.run("-m", "megatron_idempotent", *arguments, code=code)

    def casebook(self) -> dict[str, str]:
        """Rewrite the generated files; return their contents."""
        self.run("tools/casebook.py")
        return self.generated()

    def generated(self) -> dict[str, str]:
        return {name: (self.folder / name).read_text() for name in GENERATED}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    if locate("megatron.core.package_info") is None:
        pytest.skip("there is no Megatron in this environment")
    return Project(tmp_path / "project")


def megatron_that_says(version: str, folder: Path) -> Path:
    """A copy of the installed Megatron's code that claims to be another release."""
    source = locate("megatron.core.package_info")
    assert source is not None
    for name in ("core", "training"):
        if (source.parents[1] / name).is_dir():
            shutil.copytree(source.parents[1] / name, folder / "megatron" / name)
    text = (folder / INFO).read_text()
    for name, number in zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True):
        text, count = re.subn(rf"(?m)^{name} = \d+$", f"{name} = {number}", text)
        assert count == 1, text
    (folder / INFO).write_text(text)
    return folder


LIVE = """
import json, megatron_idempotent
report = megatron_idempotent.apply(strict=True)
import megatron.core.tensor_parallel.random
print(json.dumps([
    {row.id: [row.status, row.reason] for row in report},
    megatron_idempotent.report()["expert-seed-collides"].status,
]))
"""


@pytest.mark.exhaustive
def test_a_new_minor_is_a_line_in_the_table_and_one_run_of_casebook(project, tmp_path):
    newer = megatron_that_says(NEXT, tmp_path / "newer")
    project.before.append(str(newer))
    # What only commits had is in it by now: its body is read, all others are as they were.
    new = [patch.id for patch in patches().values() if patch.since == untried()]
    project.ours("drift", str(newer), "--accept", *new)
    said = f"Nobody has run {NEXT}: its functions' contents decided about each patch"
    before = project.ours("doctor").splitlines()
    assert before[1] == said
    with (project.folder / "pyproject.toml").open("a") as table:
        table.write(ENTRY)

    written = project.casebook()
    assert f"\nMEGATRON ?= {NEXT}\n" in written["Makefile"]
    assert f" | >=0.12,<{BEYOND} | " in written["HAZARDS.md"]
    assert f"<{untried()} | " not in written["HAZARDS.md"]
    after = project.ours("doctor").splitlines()
    assert after[0] == before[0], "the same patches fit"
    assert after[1] == "", "there is nothing to say of this release"
    rows, landed = json.loads(project.run("-c", LIVE))
    assert landed == "applied"
    assert not [row for row in rows.values() if row[0] in PROBLEMS]
    assert sum(status in COVERED for status, _ in rows.values()) > 50
    assert not [reason for _, reason in rows.values() if "above what was run" in reason]
    assert project.casebook() == written, "a second run changes nothing"


def part_of(patch_id: str, folder: Path) -> str:
    """The line of the part that a patch relies on, in the file of what was read."""
    lines = (folder / "patches/_generated/reviewed.txt").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("  part ") and f" {patch_id} " in line)
    return line


@pytest.mark.exhaustive
def test_a_new_case_file_is_green_after_the_steps_of_contributing(project):
    for name, text in SAMPLES.items():
        (project.folder / "patches" / f"{name.replace('-', '_')}.py").write_text(text)
    # Step 4: the installed release, whose body was read for another patch alone.
    standing = {
        row["id"]: row["standing"] for row in json.loads(project.ours("drift", "--json", code=1))
    }
    assert [standing[name] for name in SAMPLES] == ["drifted", "holds"]
    # Step 5.
    accepted = [f"--accept={name}" for name in SAMPLES]
    told = project.run("tools/casebook.py", *accepted).splitlines()
    assert [line.split(" ")[:2] for line in told] == [
        ["same-seed-refused:", "body"],
        ["same-state-refused:", "body"],
        ["same-state-refused:", "part"],
    ]
    # The file is the same in several releases, of which one is installed.
    here = installed(MEGATRON).text
    assert f" to {here}" in part_of("same-state-refused", project.folder)
    table = Table((project.folder / "patches/_generated/releases.txt").read_text().splitlines())
    assert [table.release(here).standings[name] for name in SAMPLES] == [LANDS, LANDS]
    written = project.generated()
    assert project.casebook() == written, "one command has written all that there is to write"
    assert "nothing is new" in project.ours("drift", "--accept", *SAMPLES)
    assert project.generated() == written
    standing = {row["id"]: row["standing"] for row in json.loads(project.ours("drift", "--json"))}
    assert [standing[name] for name in SAMPLES] == ["reviewed", "reviewed"]
    proven = json.loads(project.ours("prove", "--json", *SAMPLES))
    assert [row["verdict"] for row in proven] == ["proven", "proven"]
    changes = project.folder / "CHANGELOG.md"
    head = "## [Unreleased]\n"
    lines = "".join(
        f"- The patch `{name}`: a random state can be added again.\n" for name in SAMPLES
    )
    text = changes.read_text()
    assert text.count(head) == 1
    changes.write_text(text.replace(head, f"{head}\n### Added\n\n{lines}"))
    project.run(".ci/rules.py")
    project.run("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *SUITES)
