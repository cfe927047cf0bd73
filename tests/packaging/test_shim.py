"""Imports bring in nothing that is not used."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
from ranks import tiered
from starts import started

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def test_readme_says_how_many_modules_apply_loads():
    program = (
        "import json, sys, megatron_idempotent; megatron_idempotent.apply();"
        "print(json.dumps(sorted(sys.modules)))"
    )
    modules = json.loads(started(sys.executable, "-c", program).stdout)
    assert not {"torch", "megatron"} & {*modules}
    own = [name for name in modules if name.partition(".")[0] == "megatron_idempotent"]
    # A checkout looks for its case files.
    number = len({*own} - {"megatron_idempotent.checkout"})
    assert f"`apply()` loads {number} modules of this package" in README, own


#: What each entry point brings into a process, beside what has loaded it.
BROUGHT = {
    "megatron_idempotent.auto": {"hook"},
    "megatron_idempotent.proof.cpu.pytest_plugin": {
        "proof", "proof.cpu", "proof.cpu.gpu", "proof.cpu.table",
    },
    "megatron_idempotent.proof.certify.pytest_plugin": {"proof", "proof.certify"},
    "megatron_idempotent.rl.vllm_plugin": {"rl"},
}  # fmt: skip
FOUND = """
import importlib, json, sys
{before}
loaded = set(sys.modules)
importlib.import_module({module!r})
print(json.dumps(sorted(set(sys.modules) - loaded)))
"""


def entry_points() -> list[importlib.metadata.EntryPoint]:
    found = importlib.metadata.distribution("megatron-idempotent").entry_points
    return [point for point in found if point.group != "console_scripts"]


def test_an_entry_point_brings_in_its_own_modules_and_no_other(tmp_path):
    assert {point.module for point in entry_points()} == BROUGHT.keys()
    for module, rooms in BROUGHT.items():
        # vLLM's processes have imported torch, which brings in more than this needs.
        before = "import pytest" if module.startswith("megatron_idempotent.proof") else ""
        program = FOUND.format(before=before, module=module)
        found = json.loads(started(sys.executable, "-c", program, cwd=tmp_path).stdout)
        own = {f"megatron_idempotent.{room}" for room in rooms | {"lazy"}}
        # A checkout looks for its case files.
        assert {*found} - {"megatron_idempotent.checkout"} == {"megatron_idempotent", module} | own


def test_a_suite_that_uses_nothing_of_the_plugins_loads_nothing_else(tmp_path):
    (tmp_path / "test_mine.py").write_text("def test_mine():\n    assert True\n")
    (tmp_path / "conftest.py").write_text(
        "import sys\n\n\ndef pytest_unconfigure():\n"
        "    print(*(m for m in sys.modules if m.startswith('megatron_idempotent.')))\n"
    )
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path))
    *_, last = started(*command, cwd=tmp_path).stdout.splitlines()
    plugins = [module for module in BROUGHT if module.startswith("megatron_idempotent.proof")]
    rooms = {f"megatron_idempotent.{room}" for module in plugins for room in BROUGHT[module]}
    assert {*last.split()} - {"megatron_idempotent.checkout"} == {
        *plugins, *rooms, "megatron_idempotent.lazy",
    }  # fmt: skip


#: What a process is still without → what it has imported and called.
WITHOUT = {
    "torch megatron multiprocessing": "import {0}.proof.cpu, {0}.proof.cpu.pytest_plugin",
    "torch rich matplotlib wandb": "import {0}.rl.controller.status_file;"
    "from {0}.rl.metrics import loggers, names, timeline",
    "torch megatron numpy": "from {0}.rl.workers import EmbeddedRanks, frames;"
    "frames.load(frames.dump([1, b'2']))",
    "megatron": "from {0} import FSDPTrainStep",
}


@pytest.mark.parametrize("absent", tiered(WITHOUT, [*WITHOUT][:3]))
def test_what_needs_a_package_at_most_later_does_not_import_it(absent):
    does = WITHOUT[absent].format("megatron_idempotent")
    program = f"import sys; {does}; print(*set({absent.split()}) & sys.modules.keys())"
    done = started(sys.executable, "-c", program)
    assert (done.returncode, done.stdout) == (0, "\n"), done
