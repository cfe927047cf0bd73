"""Ranks copy few pages of their launcher; memory that moves into huge pages keeps its contents."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from megatron_idempotent.proof.cpu.memory import collapse_pages, fill_holes, free_chunks

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


def test_a_rank_finds_no_holes_to_allocate_in(megatron_ranks):
    if free_chunks() is None:
        pytest.skip("not glibc, or one before 2.33")
    for already_applied in (False, True):
        how = {"distributed": False, "already_applied": already_applied}
        # The imports leave two thousand, and the rank a few by then.
        ((chunks, _),) = megatron_ranks(1, free_chunks, **how)
        assert chunks < 100


def test_holes_are_filled_once():
    if free_chunks() is None:
        pytest.skip("not glibc, or one before 2.33")
    fill_holes()
    chunks, last = free_chunks()
    fill_holes()
    assert free_chunks()[0] <= chunks + 1
    assert last - free_chunks()[1] < 1 << 16, "nothing is left to fill"


def test_a_c_library_without_mallinfo2_keeps_its_holes(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert free_chunks() is None
    fill_holes()
