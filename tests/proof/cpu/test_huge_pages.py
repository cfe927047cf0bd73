"""Memory that moves into huge pages keeps its contents, also in a child that was forked from it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from megatron_idempotent.proof.cpu.launcher import collapse_pages

ROLLUP = Path("/proc/self/smaps_rollup")


def in_huge_pages() -> int:
    """Bytes of this process's anonymous memory in huge pages."""
    lines = ROLLUP.read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


def test_memory_moves_and_keeps_its_contents_also_in_a_child():
    if not ROLLUP.exists():
        pytest.skip("no smaps_rollup here")
    kept = os.urandom(1 << 20) * 16
    before, moved = in_huge_pages(), collapse_pages()
    if not moved:
        pytest.skip("this kernel makes no huge pages of what is there")
    assert in_huge_pages() > before
    assert kept == kept[: 1 << 20] * 16
    child = os.fork()
    if not child:
        same = kept == kept[: 1 << 20] * 16
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert collapse_pages() >= 0, "twice is safe"


def test_nothing_happens_where_there_is_no_such_call(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert collapse_pages() == 0
