"""All that names releases agrees with pyproject.toml's table, and the lock with what it allows."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from megatron_idempotent.patching import OPEN, UNTRIED
from megatron_idempotent.patching.base import untried
from megatron_idempotent.patching.catalog import hazards

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TABLE = PROJECT["tool"]["megatron-idempotent"]
RELEASES = [release["megatron"] for release in TABLE["releases"]]
PYTHONS = {
    python for each in TABLE["releases"] for python in (each["python"], *each.get("also", ()))
}
#: In order, with the one that the rest is run with as the last.
TORCHES = [*(each["torch"] for each in TABLE["torches"]), TABLE["torch"]]
LINES = [release.rpartition(".")[0] for release in RELEASES]


@pytest.mark.parametrize("versions", [RELEASES, TORCHES])
def test_the_table_has_one_of_each_line_in_order_without_gaps(versions):
    assert sorted(versions, key=Version) == versions
    minors = [Version(each).minor for each in versions]
    assert minors == list(range(minors[0], minors[-1] + 1))


def test_a_tabled_release_is_the_newest_of_its_line_and_read_ones_are_older():
    for read in TABLE["read"]:
        newest = RELEASES[LINES.index(read.rpartition(".")[0])]
        assert Version(read) < Version(newest)


def test_the_torches_of_fsdp_are_said_where_people_look():
    oldest, newest = (torch.rpartition(".")[0] for torch in (TORCHES[0], TORCHES[-1]))
    for place in ("docs/train-step/fsdp2.md", "megatron_idempotent/step/fsdp_run.py"):
        text = " ".join((ROOT / place).read_text().replace('"', "").split())
        assert f"torch from {oldest} to {newest}" in text, place


def test_case_files_speak_of_tabled_releases_only():
    newest = Version(RELEASES[-1])
    looked_at = Version(f"{newest.major}.{newest.minor + 1}")
    assert Version(untried()) == looked_at, "run `python tools/casebook.py`"
    for hazard in hazards().values():
        if hazard.since == untried():  # it is on commits only, so far
            assert hazard.before == OPEN
        elif hazard.distribution == "megatron-core":
            assert Version(LINES[0]) <= Version(hazard.since) <= newest
            # A release that nobody has run repairs nothing for certain: its bodies decide.
            assert hazard.before == UNTRIED or Version(hazard.since) < Version(hazard.before)
            assert hazard.before == UNTRIED or Version(hazard.before) < looked_at, hazard.id


def test_the_makefile_sets_up_the_newest_torch():
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"^TORCH \?= (.+)$", makefile, re.MULTILINE) == [TABLE["torch"]]


def test_the_trainers_extra_takes_no_torch_that_nobody_has_run():
    (wanted,) = (
        Requirement(text)
        for text in PROJECT["project"]["optional-dependencies"]["trainer"]
        if text.startswith("torch")
    )
    newest = Version(TABLE["torch"])
    assert wanted.specifier.contains(TABLE["torch"])
    assert not wanted.specifier.contains(f"{newest.major}.{newest.minor + 1}.0")


def test_the_page_of_the_install_lists_every_extra():
    page = (ROOT / "docs" / "use.md").read_text(encoding="utf-8")
    section = page.partition("## Install\n")[2].partition("\n## ")[0]
    listed = [
        cell for row in re.findall(r"^\| (`.*?) \|", section, re.M) for cell in row.split(", ")
    ]
    extras = PROJECT["project"]["optional-dependencies"]
    assert sorted(listed) == sorted(f"`{extra}`" for extra in extras)


def test_the_readme_names_the_releases_and_what_they_run_with():
    readme = " ".join((ROOT / "README.md").read_text().split())
    *pythons, newest = sorted(PYTHONS, key=Version)
    said = f"{', '.join(RELEASES[:-1])} and {RELEASES[-1]} with torch {TABLE['torch']} on Python "
    assert f"Tested on megatron-core {said}{', '.join(pythons)} and {newest}" in readme
    for each in TABLE["torches"]:
        if "suites" in each:
            assert f"with torch {each['torch']} on Python {' and '.join(each['suites'])}" in readme
    assert f"`FSDPTrainStep` on torch {TORCHES[0]} to {TORCHES[-1]}" in readme


def test_the_hazards_were_run_on_the_tabled_releases():
    proven = json.loads((ROOT / "docs" / "proven.json").read_text())
    assert [*proven] == [*RELEASES, *sorted(commit["name"] for commit in TABLE["commits"])]


@pytest.mark.skipif(find_spec("nox") is None, reason="nox is for development, not for the matrix")
def test_nox_has_a_session_per_release():
    asked = ["--session", "release", "newest", "older", "fsdp", "patching", "--list", "--json"]
    command = [sys.executable, "-m", "nox", *asked]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sessions = [session["session"] for session in json.loads(listed)]
    assert sessions == [
        *(f"release(megatron='{release}')" for release in RELEASES),
        *(f"newest(version='{version}')" for version in TABLE["releases"][-1]["also"]),
        *(
            f"older(torch='{each['torch']}', version='{version}')"
            for each in TABLE["torches"]
            for version in each.get("suites", ())
        ),
        *(f"fsdp(torch='{torch}')" for torch in TORCHES),
        *(f"patching(version='{version}')" for version in TABLE["patching"]),
    ]


def test_every_python_that_is_tested_on_is_promised_and_the_oldest_and_newest_are_tested_on():
    said = "Programming Language :: Python :: "
    promised = [c.removeprefix(said) for c in PROJECT["project"]["classifiers"] if said in c]
    promised = [version for version in promised if "." in version]
    assert set(promised) >= PYTHONS
    assert TABLE["patching"] == [promised[0], promised[-1]]
    assert PROJECT["project"]["requires-python"] == f">={promised[0]}"


LOCK = ROOT / "requirements" / "dev.lock"
#: The machine that the lock is made for: `--python-version 3.12 --python-platform linux`.
MACHINE = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux"}


@functools.cache
def pins() -> dict[str, str]:
    found = {}
    for name, version in re.findall(r"^(\S+)==(\S+)", LOCK.read_text("utf-8"), re.MULTILINE):
        found[canonicalize_name(name)] = version
    return found


def direct() -> list[Requirement]:
    """List what the project, its extra `trainer`, and the groups ask for by name."""
    asked = [*PROJECT["project"]["dependencies"]]
    for extra in ("trainer", "controller"):
        asked += PROJECT["project"]["optional-dependencies"][extra]
    for group in PROJECT["dependency-groups"].values():
        asked += [each for each in group if isinstance(each, str)]
    wanted = map(Requirement, asked)
    return [
        each
        for each in wanted
        if each.name != PROJECT["project"]["name"]
        and (each.marker is None or each.marker.evaluate(MACHINE))
    ]


@pytest.mark.parametrize("wanted", direct(), ids=str)
def test_a_direct_dependency_is_locked_to_a_version_that_is_allowed(wanted):
    locked = pins().get(canonicalize_name(wanted.name))
    assert locked is not None, "it is not in requirements/dev.lock: make lock"
    assert wanted.specifier.contains(locked, prereleases=True), f"{locked}: make lock"


def test_torch_and_megatron_are_those_that_set_up_installs():
    locked = pins()
    assert locked["torch"] == TABLE["torch"]
    assert locked["megatron-core"] == TABLE["releases"][-1]["megatron"]


def test_each_file_that_it_installs_has_a_hash():
    text = re.sub(r"\n +#.*", "", LOCK.read_text("utf-8"))  # what asks for it
    asked = re.findall(r"^\S+==\S+(.*(?:\n    .*)*)$", text, re.MULTILINE)
    assert len(asked) == len(pins()) > 100
    line = r" \\\n    --hash=sha256:[0-9a-f]{64}"
    assert [each for each in asked if not re.fullmatch(f"({line})+", each)] == []


def test_nothing_in_it_is_of_one_machine():
    """Neither a path nor an index, of which other machines know nothing."""
    text = LOCK.read_text("utf-8")
    assert not re.findall(r"^-|file:|https?:|@ ", text, re.MULTILINE)
    assert "/" not in text.replace("(pyproject.toml", "")
