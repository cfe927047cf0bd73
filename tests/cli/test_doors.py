"""`init` and `auto` bring patches into programs that nobody edits."""

import argparse
import json
import sys
from importlib import metadata

import pytest
from starts import LOADED, started

import megatron_idempotent
from megatron_idempotent.cli.hook import PTH_LINE
from megatron_idempotent.hook import PACKAGES
from megatron_idempotent.patching.catalog import index_entries
from megatron_idempotent.patching.rows import COVERED


def test_every_package_that_has_patches_is_waited_for():
    targets = [target for each in index_entries().values() for target in each.targets]
    assert {target.address.partition(".")[0] for target in targets} <= PACKAGES


def test_a_function_that_a_framework_calls_with_its_arguments():
    try:
        report = megatron_idempotent.init(argparse.Namespace(lr=0.1))
        assert {row.id for row in report} == set(index_entries())
        # In a process where an earlier test has imported Megatron they are on already.
        on = [row.id for row in report if row.status in COVERED]
        assert [row.id for row in megatron_idempotent.init() if row.status in COVERED] == on
    finally:
        megatron_idempotent.revert()


def test_verls_loader_finds_the_plugin_and_it_waits():
    (plugin,) = metadata.entry_points(group="verl.plugins", name="megatron_idempotent")
    assert plugin.value == "megatron_idempotent.auto"
    program = (
        "from importlib.metadata import entry_points\n"
        "[each.load() for each in entry_points(group='verl.plugins')]\n" + LOADED
    )
    shown = started(sys.executable, "-c", program)
    assert shown.returncode == 0, shown.stderr
    assert "megatron_idempotent.hook" in shown.stdout.split()
    assert not any("patching" in name for name in shown.stdout.split())


WAITS = """
import json, sys, megatron_idempotent
DOOR
def told(report):
    return {row.id: (row.status, row.reason) for row in report}
before = told(megatron_idempotent.report())
megatron_idempotent.verify()
assert not [name for name in sys.modules if name.partition(".")[0] in ("megatron", "torch")]
print(json.dumps([before, told(megatron_idempotent.apply())]))
"""


@pytest.mark.parametrize("door", ["import megatron_idempotent.auto", "hook"])
def test_before_megatron_a_door_reports_what_its_apply_will_begin_with(door):
    finder = f"exec({PTH_LINE!r})" if door == "hook" else door
    program = WAITS.replace("DOOR", finder)
    done = started(sys.executable, "-c", program, MEGATRON_IDEMPOTENT="1")
    assert done.returncode == 0, done.stderr
    before, applied = json.loads(done.stdout)
    assert before == applied
    assert any(status == "pending_import" for status, _ in before.values())


def test_without_an_apply_and_without_a_door_verify_raises():
    program = "import megatron_idempotent; megatron_idempotent.verify()"
    done = started(sys.executable, "-c", program)
    assert done.returncode == 1
    assert "VerificationError: no patch is in place: apply() was not called" in done.stderr
    off = program.replace(";", "; megatron_idempotent.apply();")
    assert started(sys.executable, "-c", off, MEGATRON_IDEMPOTENT="0").returncode == 0


def test_an_error_in_the_environment_is_told_before_verl_swallows_it():
    program = "import sys; sys.modules['megatron'] = sys\nimport megatron_idempotent.auto"
    done = started(sys.executable, "-c", program, MEGATRON_IDEMPOTENT_ONLY="no-such-patch")
    assert done.returncode == 1
    assert "megatron-idempotent: no patch is in place: UnknownPatchError:" in done.stderr
    assert json.dumps("no-such-patch")[1:-1] in done.stderr
