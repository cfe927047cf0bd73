"""The lock has each direct dependency of development, in a version that pyproject.toml allows."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "dev.lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
TABLE = PROJECT["tool"]["megatron-idempotent"]
#: The machine that the lock is made for: `--python-version 3.12 --python-platform linux`.
MACHINE = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux"}


@functools.cache
def pins() -> dict[str, str]:
    found = {}
    for line in LOCK.read_text("utf-8").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            name, version = line.split("==")
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


def test_nothing_in_it_is_of_one_machine():
    """Neither a path nor an index, of which other machines know nothing."""
    text = LOCK.read_text("utf-8")
    assert not re.findall(r"^-|file:|https?:|@ ", text, re.MULTILINE)
    assert "/" not in text.replace("(pyproject.toml", "")
