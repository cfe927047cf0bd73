"""Segments: how many there are, whose they are, and what becomes of them."""

from __future__ import annotations

import asyncio
import os
import pathlib
import subprocess
import sys

import pytest
from weight_peers import Peers, filled

from megatron_idempotent.rl.weights import UpdateDamaged, WeightUpdate
from megatron_idempotent.rl.weights import transports as t
from megatron_idempotent.rl.weights.transports import shared_memory

pytestmark = pytest.mark.full

UPDATE = WeightUpdate(id="run/1", version=1)
GRAIN = 1 << 21


def mine() -> list[pathlib.Path]:
    return list(shared_memory.DIRECTORY.glob(f"{shared_memory.PREFIX}.*.{os.getpid()}.*"))


async def test_a_segment_of_the_wrong_size_is_refused() -> None:
    sender = t.SharedMemorySender()
    receiver = t.receiver(await sender.open(UPDATE))
    announced = dict(await sender.announce(filled(0)))
    path = shared_memory.DIRECTORY / announced["segment"]
    for size, announced_size, named in (
        (GRAIN, GRAIN + 1, f"{GRAIN} bytes, {GRAIN + 1}"),
        (1000, GRAIN, f"1000 bytes, {GRAIN}"),
        (1000, 1000, "within w"),  # too little for the bucket
    ):
        os.truncate(path, size)
        with pytest.raises(UpdateDamaged, match=named):
            receiver.receive({**announced, "segment_bytes": announced_size})
    path.unlink()
    with pytest.raises(UpdateDamaged, match=f"{path} is absent"):
        receiver.receive(announced)
    await sender.close()  # though its segment is gone


async def test_nothing_but_a_segment_is_read() -> None:
    sender = t.SharedMemorySender()
    receiver = t.receiver(await sender.open(UPDATE))
    announced = await sender.announce(filled(0))
    for name in ("/etc/passwd", "other", f"{shared_memory.PREFIX}./../../etc/passwd", None):
        with pytest.raises(UpdateDamaged, match=f"{name}'|None as 'segment'"):
            receiver.receive({**announced, "segment": name})
    await sender.close()


LIMITED = """
import asyncio, resource
from weight_peers import filled
from megatron_idempotent.rl.weights import WeightUpdate
from megatron_idempotent.rl.weights import transports as t
async def main():
    sender = t.SharedMemorySender()
    await sender.open(WeightUpdate(id="run/1", version=1))
    for most in (0, 4096):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        try:
            await sender.announce(filled(0))
        except t.TransportError as error:
            print(error)
    print([path for path in t.shared_memory.DIRECTORY.iterdir() if SELF in path.name])
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    print((await sender.announce(filled(0)))["index"])
    await sender.close()
import os
SELF = f".{os.getpid()}."
asyncio.run(main())
"""


def test_a_limit_on_files_is_named_and_leaves_nothing() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    *said, left, index = ended.stdout.splitlines()
    assert len(said) == 2
    for line in said:
        assert "no room for a segment of 2 MB" in line
        assert "files of at most 0 MB (ulimit -f): [Errno 27] File too large" in line
    assert (left, index, ended.stderr) == ("[]", "0", "")


async def test_a_worker_that_ends_unlinks_nothing_and_complains_of_nothing(peers: Peers) -> None:
    sender, worker = t.SharedMemorySender(), peers[0]
    opened = await sender.open(UPDATE)
    worker.ask("open", name="r", opened=opened, rank=1)
    announced = await sender.announce(filled(0))
    worker.ask("receive", name="r", announced=announced)
    said = worker.end()
    assert "resource_tracker" not in said
    assert "shared_memory" not in said
    assert len(mine()) == 1
    assert t.receiver(opened).receive(announced).index == 0
    await sender.close()


async def test_segments_of_a_killed_trainer_are_removed_by_the_next_one(peers: Peers) -> None:
    made = peers[1].ask("send", kind="shared_memory", arguments={})
    name = made["announced"]["segment"]
    receiver = t.receiver(made["opened"])
    assert name not in t.remove_stale_segments()  # its owner lives
    assert receiver.receive(made["announced"]).index == 0
    peers[1].kill(group=True)  # its resource tracker, which would clean up, as well
    assert (shared_memory.DIRECTORY / name).exists()

    sender = t.SharedMemorySender()
    await sender.open(UPDATE)
    await sender.close()
    assert not (shared_memory.DIRECTORY / name).exists()
    with pytest.raises(UpdateDamaged, match="is absent"):
        receiver.receive(made["announced"])


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_only_segments_of_dead_owners_are_stale(dead_pid: int) -> None:
    here, me = shared_memory._namespace(), os.getpid()
    began = shared_memory._started(me)
    names = {
        f"{here}.{dead_pid}.5.ab": True,
        f"{here}.{me}.{began - 1}.ab": True,  # an earlier process with this one's PID
        f"{here}.{me}.{began}.ab": False,
        f"{here + 1}.{dead_pid}.5.ab": False,  # another container's, whose PIDs are others
        f"{here}.{dead_pid}.ab": False,  # not a name of ours
        f"{here}.{dead_pid}.x.ab": False,
    }
    for name in names:
        (shared_memory.DIRECTORY / f"{shared_memory.PREFIX}.{name}").write_bytes(b"")
    try:
        removed = t.remove_stale_segments()
        stale = {f"{shared_memory.PREFIX}.{name}" for name, is_stale in names.items() if is_stale}
        made = {f"{shared_memory.PREFIX}.{name}" for name in names}
        assert made.intersection(removed) == stale
        assert {path.name for path in shared_memory.DIRECTORY.iterdir()} & made == made - stale
    finally:
        for name in names:
            (shared_memory.DIRECTORY / f"{shared_memory.PREFIX}.{name}").unlink(missing_ok=True)


def test_a_zombie_owns_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert shared_memory._started(process.pid) is not None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert shared_memory._started(process.pid) is None
    process.wait()
    process.stdin.close()


def test_a_machine_without_shared_memory_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(
        "megatron_idempotent.rl.weights.transports.shared_memory.DIRECTORY", tmp_path / "none"
    )
    with pytest.raises(t.TransportError, match="no shared memory"):
        asyncio.run(t.SharedMemorySender().open(UPDATE))
