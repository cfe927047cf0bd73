"""`doctor` tells a commit from a release, and names who else stands at our functions."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys

import pytest
from checkouts import info_of
from starts import COMMAND, started

from megatron_idempotent.cli.main import main
from megatron_idempotent.patching.releases import installed
from megatron_idempotent.patching.source import locate

pytestmark = pytest.mark.full

NEIGHBOUR = """
import functools
from megatron.core.tensor_parallel import random

below = random.model_parallel_cuda_manual_seed

@functools.wraps(below)
def wrapper(*args, **kwargs):
    return below(*args, **kwargs)

random.model_parallel_cuda_manual_seed = wrapper

def replace():
    random.CudaRNGStatesTracker.add = lambda self, name, seed: None
"""


def doctor_beside(*named: str) -> list[tuple[int, str]]:
    """Runs on a rank: the exit codes of `doctor --beside`, and what it prints."""
    found = []
    for what in named:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(["doctor", "--beside", what])
        found.append((code, said.getvalue()))
    return found


def test_doctor_names_who_else_stands_at_a_function(tmp_path, monkeypatch, megatron_ranks):
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    (tmp_path / "mindspeed.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "halfway.py").write_text("import no_such_module")
    wrong = {
        "nobody": f"no module 'nobody' on the path of {sys.executable}: write MODULE[:FUNCTION]",
        "json.nobody:f": "no module 'json.nobody' on the path",
        "halfway": "importing halfway raises ModuleNotFoundError: No module named 'no_such_module'",
        "json:no": "the module json has no function 'no': write the one that patches Megatron",
        ".nobody": "'.nobody' is no module",
    }
    named = "neighbour:replace", *wrong
    (((code, said), *others),) = megatron_ranks(1, doctor_beside, *named, already_applied=True)
    assert code == 1, said
    assert "mindspeed patches Megatron, too: `doctor --beside" in said
    _, problems, shared, *_ = said.split("\n\n")
    assert "CudaRNGStatesTracker.add by neighbour" in problems
    assert shared.startswith("In place, with somebody else at the same function (2)")
    assert "pipeline-seed-offset" in shared
    assert "wrapped by neighbour: runs outside of ours" in shared
    for (code, said), (what, why) in zip(others, wrong.items(), strict=True):
        assert (code, f"--beside {what}: " in said, why in said) == (2, True, True)


def test_doctor_tells_a_commit_from_the_release_whose_version_it_says(tmp_path):
    source = locate("megatron.core.package_info")
    assert source is not None
    leave = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(source.parents[1], tmp_path / "megatron", ignore=leave)
    info = tmp_path / "megatron/core/package_info.py"
    changed = tmp_path / "megatron/core/transformer/moe/moe_utils.py"
    claimed = installed("megatron-core").text
    known = started(*COMMAND, "doctor", PYTHONPATH=tmp_path).stdout.splitlines()
    assert known[1] == ""
    said = info.read_text()
    info.write_text(info_of("0.20.0rc1"))
    _, second, *_ = started(*COMMAND, "doctor", PYTHONPATH=tmp_path).stdout.splitlines()
    assert second == f"Megatron says 0.20.0rc1, and has the files of {claimed}"
    changed.write_text(changed.read_text().replace(".copy_(scale)", ".copy_(scale * 1)"))
    _, second, *_ = started(*COMMAND, "doctor", PYTHONPATH=tmp_path).stdout.splitlines()
    assert second.startswith("Megatron says 0.20.0rc1, which is no release that we have read: ")
    info.write_text(said)
    first, second, *_ = started(*COMMAND, "doctor", PYTHONPATH=tmp_path).stdout.splitlines()
    assert "1 DRIFTED: aux-loss-scale-refused; " in first
    named = re.escape("(megatron.core.transformer.moe.moe_utils)")
    said = rf"Megatron says {claimed}, but 1 of the \d+ files that patches read are not .*{named}: "
    assert re.match(said, second)
