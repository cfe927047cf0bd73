"""`releases.txt` knows the installed release by its files, and says what lands on it."""

from __future__ import annotations

import pytest
from release_table import renewed_table

from megatron_idempotent.cli.trees import installed_trees
from megatron_idempotent.patching.base import MEGATRON, generated
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.releases import TABLE, UNKNOWN_STANDING, Table, installed
from megatron_idempotent.patching.surroundings import table


@pytest.fixture
def known():
    if installed(MEGATRON) is None:
        pytest.skip("there is no Megatron in this environment")
    return generated(TABLE)


def test_what_is_read_of_the_installed_release_is_what_the_table_says(known):
    assert renewed_table(known, installed_trees(), table()) == known, (
        "run `python tools/casebook.py .nox/wheels`"
    )


def test_every_patch_has_a_mark_for_the_installed_release(known):
    release = Table(known).release(installed(MEGATRON).text)
    ours = {patch.id for patch in patches().values() if patch.distribution == MEGATRON}
    assert release.standings.keys() == ours
    assert UNKNOWN_STANDING not in release.standings.values()


def test_a_mark_that_no_longer_holds_is_renewed_and_a_module_that_nobody_read_is_named(known):
    name = installed(MEGATRON).text
    at = Table(known).names.index(name)
    seed = next(line for line in known if line.startswith("pipeline-seed-offset "))
    head, marks = seed.split()
    wrong = [line if line != seed else f"{head} {marks[:at]}f{marks[at + 1 :]}" for line in known]
    assert Table(wrong).release(name).standings[head] == "f"
    assert renewed_table(wrong, installed_trees(), table()) == known
    unread = [
        line for line in known if not line.startswith("megatron.core.tensor_parallel.random ")
    ]
    with pytest.raises(ValueError, match=r"megatron\.core\.tensor_parallel\.random"):
        renewed_table(unread, installed_trees(), table())
