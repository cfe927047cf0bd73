"""Ranks copy few pages of their launcher; memory that moves into huge pages keeps its contents."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from megatron_idempotent.proof.cpu.memory import collapse_pages, fill_holes, free_chunks

ROLLUP = Path("/proc/self/smaps_rollup")
tells_its_chunks = pytest.mark.skipif(free_chunks() is None, reason="not glibc from 2.33 on")


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


@tells_its_chunks
def test_a_rank_finds_no_holes_to_allocate_in(megatron_ranks):
    for already_applied in (False, True):
        how = {"distributed": False, "already_applied": already_applied}
        # The imports leave two thousand, and the rank a few by then.
        ((chunks, _),) = megatron_ranks(1, free_chunks, **how)
        assert chunks < 100


def tables_of_dynamo() -> int:
    """Return how many of Dynamo's largest tables, which a rank clears when it joins, are there."""
    from torch._dynamo import trace_rules

    return trace_rules.get_torch_obj_rule_map.cache_info().currsize


def test_a_rank_has_no_table_to_free_when_it_joins(megatron_ranks):
    assert megatron_ranks(1, tables_of_dynamo, distributed=False) == [0]


def filled_twice() -> list[tuple[int, int]]:
    """Leave a thousand holes on this process's heap, and fill them twice; return what is free
    before the first time and after each.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_size_t, (ctypes.c_size_t,)
    blocks = [libc.malloc(600) for _ in range(2000)]
    for block in blocks[::2]:
        libc.free(block)
    free = [free_chunks()]
    for _ in range(2):
        fill_holes()
        free.append(free_chunks())
    return free


@tells_its_chunks
def test_holes_are_filled_once(megatron_ranks):
    ((before, first, second),) = megatron_ranks(1, filled_twice, distributed=False)
    assert before[0] > 900
    assert first[0] < 100
    assert second[0] < 100
    assert first[1] - second[1] < 1 << 16, "nothing is left to fill"


def test_a_c_library_without_mallinfo2_keeps_its_holes(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert free_chunks() is None
    fill_holes()
