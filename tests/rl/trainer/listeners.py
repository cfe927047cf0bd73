"""Listening sockets of processes, by /proc, and the table of SECURITY.md that lists them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pickle
import re
import threading
from pathlib import Path
from typing import NamedTuple

import kill_points

from megatron_idempotent.rl.trainer.async_ranks import PolicyWorker

PAGE = Path(__file__).parents[3] / "SECURITY.md"
REPORT = "rank-{}.report"
STORE = "torch's `TCPStore`"


class Row(NamedTuple):
    """A row of the table, without what it says to readers."""

    process: str
    socket: str
    number: str
    address: str


class Listener(NamedTuple):
    """A listening socket."""

    inode: str
    kind: str
    address: str
    port: int


def table(way):
    """The table's rows of one way to run."""
    text = PAGE.read_text("utf-8").partition("\n## What listens")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {Row(*rest[:4]) for ways, *rest in cells if way in ways.split(", ")}


def listening(pid):
    """The sockets that a process listens at."""
    return _held(pid, all_listening(pid))


def all_listening(pid="self"):
    """Return the listening sockets of all processes in a process's network, by inode."""
    found = {}
    with contextlib.suppress(OSError):  # it has ended
        for kind in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == "0A":
                    address, port = local.split(":")
                    found[inode] = Listener(inode, "TCP", named(address), int(port, 16))
        for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
            _, _, _, flags, _, _, inode, *path = line.split()
            if int(flags, 16) & 0x10000:  # __SO_ACCEPTCON
                found[inode] = Listener(inode, "Unix", " ".join(path), 0)
    return found


def _held(pid, listeners):
    """Return those of the listening sockets that a process holds."""
    held = set()
    with contextlib.suppress(OSError):  # it has ended
        for each in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it has been closed
                held |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(each.path)))
    return {each for inode, each in listeners.items() if inode in held}


def named(address):
    """An address of /proc/net/tcp, as the table names it."""
    words = bytes.fromhex(address)
    packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    ip = ipaddress.ip_address(packed)
    return "every interface" if ip.is_unspecified else "127.0.0.1" if ip.is_loopback else str(ip)


@contextlib.contextmanager
def watched():
    """Yield what the processes below this one listen at from now on, by process, as it is seen."""
    before, seen, over = listening(os.getpid()), {}, threading.Event()

    def watch():
        while not over.wait(0.05):
            processes, listeners = kill_points.descendants(os.getpid()), all_listening()
            for pid in processes:
                if found := _held(pid, listeners) - before:
                    seen.setdefault(pid, set()).update(found)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield seen
    finally:
        over.set()
        watching.join()


def report():
    """Runs on a rank: its process, its process groups, its store's port, and its listeners."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return {
        "rank": int(os.environ["RANK"]),
        "pid": os.getpid(),
        "groups": len(distributed_c10d._world.pg_map),
        "store": store.port,
        "listeners": listening(os.getpid()),
    }


def rows_of_ranks(reports):
    """Return the listeners of ranks that have all their groups, as rows of the table."""
    found = {}
    for each in reports:
        kinds = {}
        for listener in each["listeners"]:
            kind = listener.kind
            if kind == "TCP":
                kind = STORE if listener.port == each["store"] else "gloo"
            kinds.setdefault((kind, listener.address), set()).add(listener)
        for (kind, address), sockets in kinds.items():
            found.setdefault((kind, str(len(sockets)), address), []).append(each["rank"])
    everyone = [each["rank"] for each in reports]
    return {
        Row("each rank" if ranks == everyone else f"rank {str(ranks).strip('[]')}", *rest)
        for rest, ranks in found.items()
    }


class ReportingWorker(PolicyWorker):
    """The trainer's worker; each rank leaves its report beside the run's model."""

    def save_hf(self, directory):
        super().save_hf(directory)
        file = Path(directory).with_name(REPORT.format(os.environ["RANK"]))
        file.write_bytes(pickle.dumps(report()))


def rows_of_torchrun(seen, torchrun, ranks):
    """Return the listeners of a torchrun and its ranks, by their process ids, as rows of the table.

    Nothing else that was seen may listen.
    """
    stores = seen.pop(torchrun)
    rows = {Row("torchrun", STORE, str(len(stores)), each.address) for each in stores}
    # A process has its parent's sockets until it runs a program of its own.
    of_ranks = [seen.pop(pid) - stores for pid in ranks]
    assert set().union(*seen.values()) <= stores
    (number,) = {len(sockets) for sockets in of_ranks}
    for each in set().union(*of_ranks):
        rows.add(Row("each rank", each.kind.replace("TCP", "gloo"), str(number), each.address))
    return rows
