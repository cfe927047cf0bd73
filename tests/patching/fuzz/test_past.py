"""Code that goes past patched functions of the real Megatron: the report names all, and no more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_idempotent.patching.source import locate

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        locate("megatron.core.package_info") is None, reason="no megatron-core is installed"
    ),
]


def wrong(count: int) -> tuple[list[str], int]:
    """Return what `live.py` says of so many changes, 0 for all, and how many it has made."""
    command = [sys.executable, str(Path(__file__).with_name("live.py")), str(count), "0"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    *said, number = done.stdout.splitlines()
    return said, int(number)


def test_one_change_of_each_kind_is_named_and_right_code_is_not():
    said, number = wrong(40)
    assert said == []
    assert number >= 30


@pytest.mark.exhaustive
def test_every_change_past_every_patched_function_is_named():
    said, number = wrong(0)
    assert said == []
    assert number >= 2_000
