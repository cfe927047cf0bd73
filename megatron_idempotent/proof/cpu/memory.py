"""Arranges a launcher's memory so that the ranks that it forks share as much of it as they can.

A fork shares all pages. A rank that writes one, if only a reference count or a free chunk's links,
copies it, which takes several microseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path


def lay_names_together() -> None:
    """Store the names of all modules side by side in memory.

    A rank that lists `sys.modules`, as `apply()` does, writes the reference count of each name, and
    so copies the memory page that it is in: 1,300 pages where the names lie anywhere, 60 here.
    """
    for name in list(sys.modules):
        sys.modules[name.encode().decode()] = sys.modules.pop(name)


def clear_tables_of_dynamo() -> None:
    """Clear the tables that Dynamo has filled since it was imported; do nothing if it was not.

    torch's `init_process_group` clears them on each rank, which would copy 280 pages to free them.
    """
    if (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        rules.clear_lru_cache()


def free_chunks() -> tuple[int, int] | None:
    """Return how many chunks of this process's heap are free, and the size in bytes of the last
    one, which the heap grows by; None with another C library than glibc, or one before 2.33.
    """
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return None
    numbers = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
    sizes = ("fordblks", "keepcost")
    # In a function, as what ctypes makes cannot be pickled by value. The fields are <malloc.h>'s.
    fields = [(name, ctypes.c_size_t) for name in (*numbers, *sizes)]
    mallinfo2.restype = type("mallinfo2", (ctypes.Structure,), {"_fields_": fields})
    info = mallinfo2()
    return info.ordblks, info.keepcost


def fill_holes() -> None:
    """Allocate the free chunks between the allocated ones on this process's heap, for good.

    malloc takes such a chunk before it takes memory from the end of the heap, and each is on
    another page, which a rank then copies: 1,700 of the 8,000 pages that a rank of two steps
    writes. They are 2,500 chunks of 1.7 MB together. This works with glibc; elsewhere nothing
    happens.
    """
    if (chunks := free_chunks()) is None:
        return
    libc = ctypes.CDLL(None)
    libc.sbrk.argtypes, libc.sbrk.restype = (ctypes.c_ssize_t,), ctypes.c_size_t
    libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_size_t
    libc.free.argtypes, libc.free.restype = (ctypes.c_size_t,), None
    last_chunk = libc.sbrk(0) - chunks[1]
    # What a large block leaves of a chunk, the smaller ones fill, down to malloc's smallest.
    for size in (*(1 << power for power in range(16, 10, -1)), *range(1016, 16, -16)):
        while 0 < (address := libc.malloc(size)) < last_chunk:
            pass
        libc.free(address)


# From <linux/mman.h>: `MADV_HUGEPAGE` asks for huge pages where the system gives none by itself,
# `MADV_COLLAPSE` merges existing pages into them.
_HUGE_PAGE, _COLLAPSE, _SIZE = 14, 25, 2 << 20


def collapse_pages() -> int:
    """Move this process's private memory into huge pages; return the bytes that were moved.

    It then forks in a third of the time: a fork copies a table entry for each page of 4 KiB, with
    torch and Megatron in memory some 100,000, 20 ms with the end of the child. A huge page has one
    entry for 2 MiB. Memory that a child writes is split off page by page, as without huge pages. It
    takes 2.5 s for each GB, changes no contents and is safe to repeat. This works on Linux from 6.1
    on; elsewhere nothing happens.
    """
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    with contextlib.suppress(OSError, AttributeError):
        maps = Path("/proc/self/maps").read_text(encoding="ascii", errors="replace")
        for line in maps.splitlines():
            span, mode, _, _, _, *name = line.split(maxsplit=5)
            if mode != "rw-p" or name not in ([], ["[heap]"]):
                continue  # it belongs to a file or a stack
            start, end = (int(address, 16) for address in span.split("-"))
            start, end = -(-start // _SIZE) * _SIZE, end // _SIZE * _SIZE  # whole huge pages
            if start < end:
                libc.madvise(start, end - start, _HUGE_PAGE)
                if libc.madvise(start, end - start, _COLLAPSE) == 0:
                    moved += end - start
    return moved
