"""Buckets as files: what a damaged one does, and what is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from weight_peers import every_kind_of_tensor

from megatron_idempotent.rl.weights import Bucket, UpdateDamaged, WeightUpdate
from megatron_idempotent.rl.weights import transports as t
from megatron_idempotent.rl.weights.transports.disk import LOCK

UPDATE = WeightUpdate(id="run/1", version=1)
BUCKET = Bucket.of(0, {"w": torch.arange(100.0), "b": torch.ones(3)})


def receive_after(damage: Callable[[pathlib.Path], object], tmp_path: pathlib.Path) -> Bucket:
    """Send one bucket, do something to its file, and receive it."""
    sender = t.DiskSender(tmp_path)

    async def scenario() -> Bucket:
        receiver = t.receiver(await sender.open(UPDATE))
        announced = await sender.announce(BUCKET)
        (folder,) = tmp_path.iterdir()
        damage(folder / announced["file"])
        try:
            return receiver.receive(announced)
        finally:
            await sender.close()

    return asyncio.run(scenario())


def replace(path: pathlib.Path, *changes: tuple[bytes, bytes]) -> None:
    content = path.read_bytes()
    for old, new in changes:
        content = content.replace(old, new)
    path.write_bytes(content)


def begin_with(path: pathlib.Path, content: bytes) -> None:
    path.write_bytes(content + path.read_bytes()[len(content) :])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"it has \d+ bytes, \d+"),
        (pathlib.Path.unlink, "is absent"),
        (lambda path: begin_with(path, b"\xff" * 8), "claims 18446744073709551615 bytes"),
        (lambda path: begin_with(path, b"\x10" + b"\0" * 7 + b"*"), "cannot be read: Expecting"),
        (lambda path: replace(path, (b"[100]", b"[10] ")), r"\[10\].*float32 \[100\]"),
        (lambda path: replace(path, (b'"w"', b'"W"')), "'w'"),
        (
            lambda path: replace(path, (b"[0,400]", b"[9,409]"), (b"[12,412]", b"[99,499]")),
            "within w",
        ),
    ],
)
def test_a_file_that_was_damaged_is_refused(
    tmp_path: pathlib.Path, damage: Callable[[pathlib.Path], object], said: str
) -> None:
    with pytest.raises(UpdateDamaged, match=said):
        receive_after(damage, tmp_path)


async def test_files_outside_of_the_updates_folder_are_not_read(tmp_path: pathlib.Path) -> None:
    sender = t.DiskSender(tmp_path)
    receiver = t.receiver(await sender.open(UPDATE))
    announced = await sender.announce(BUCKET)
    (folder,) = tmp_path.iterdir()
    (folder / announced["file"]).rename(tmp_path / "outside")
    for name in ("../outside", str(tmp_path / "outside")):
        with pytest.raises(UpdateDamaged, match=f"{folder.name}/outside is absent"):
            receiver.receive({**announced, "file": name})
    for key in ("file", "file_bytes"):
        with pytest.raises(UpdateDamaged, match=f"None as '{key}'"):
            receiver.receive({**announced, key: None})
    await sender.close()


async def test_a_file_has_its_name_only_once_it_is_whole(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = t.DiskSender(tmp_path)
    rename, before = os.replace, []

    def watched(source: pathlib.Path, target: pathlib.Path) -> None:
        before.append((target.exists(), load_file(source).keys()))
        rename(source, target)

    monkeypatch.setattr("os.replace", watched)

    await sender.open(UPDATE)
    await sender.announce(BUCKET)
    await sender.close()
    assert before == [(False, BUCKET.tensors.keys())]


async def test_a_bucket_that_cannot_be_written_leaves_no_part_of_it(tmp_path: pathlib.Path) -> None:
    sender = t.DiskSender(tmp_path)
    await sender.open(UPDATE)
    (folder,) = tmp_path.iterdir()
    (folder / "model-00000.safetensors").mkdir()  # where the file is to go
    with pytest.raises(t.TransportError, match=f"bucket 0 .*{folder}"):
        await sender.announce(BUCKET)
    assert {path.name for path in folder.iterdir()} == {LOCK, "model-00000.safetensors"}
    await sender.announce(Bucket.of(1, {"w": torch.ones(3)}))
    await sender.close()
    assert list(tmp_path.iterdir()) == []


async def test_the_safetensors_library_reads_the_same_files(tmp_path: pathlib.Path) -> None:
    sender = t.DiskSender(tmp_path)
    tensors = every_kind_of_tensor()
    await sender.open(UPDATE)
    announced = await sender.announce(Bucket.of(0, tensors))
    (folder,) = tmp_path.iterdir()
    loaded = load_file(folder / announced["file"])
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(
            loaded[name].reshape(-1).view(torch.uint8),
            tensor.detach().contiguous().reshape(-1).view(torch.uint8),
        )
    with safe_open(folder / announced["file"], "pt") as file:
        metadata = file.metadata()
    assert (metadata["format"], metadata["update"], metadata["bucket"]) == ("pt", "run/1", "0")
    assert json.loads(metadata["checksums"]) == announced["tensors"]
    await sender.close()


async def test_a_released_bucket_takes_no_more_room(tmp_path: pathlib.Path) -> None:
    sender = t.DiskSender(tmp_path)
    await sender.open(UPDATE)
    await sender.announce(BUCKET)
    await sender.release(BUCKET)
    await sender.release(BUCKET)
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in folder.iterdir()] == [LOCK]
    await sender.close()


async def test_senders_to_two_engines_share_a_directory(tmp_path: pathlib.Path) -> None:
    senders = [t.DiskSender(tmp_path), t.DiskSender(tmp_path)]
    receivers = [t.receiver(await sender.open(UPDATE)) for sender in senders]
    announced = [await sender.announce(BUCKET) for sender in senders]
    await senders[0].close()
    assert torch.equal(receivers[1].receive(announced[1]).tensors["w"], BUCKET.tensors["w"])
    await senders[1].close()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    sender = t.DiskSender(tmp_path / "file")
    with pytest.raises(t.TransportError, match=f"{tmp_path}/file"):
        asyncio.run(sender.open(UPDATE))


#: A trainer that has sent a bucket, and waits to be killed.
TRAINER = """
import asyncio, sys, time, torch
from megatron_idempotent.rl.weights import Bucket, WeightUpdate
from megatron_idempotent.rl.weights.transports import DiskSender
async def send():
    sender = DiskSender(sys.argv[1])
    await sender.open(WeightUpdate(id="run/0", version=7))
    await sender.announce(Bucket.of(0, {"w": torch.arange(100.0)}))
    print("sent", flush=True)
    time.sleep(600)
asyncio.run(send())
"""


async def test_what_a_trainer_left_that_was_killed_goes_with_the_next_update(
    tmp_path: pathlib.Path,
) -> None:
    mine = [tmp_path / "version-00000001-mine", tmp_path / "notes", tmp_path / "version-2"]
    for path in mine:
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"mine")
    command = [sys.executable, "-c", TRAINER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "sent\n"
        (left,) = tmp_path.glob("version-00000007-*")
        sender = t.DiskSender(tmp_path)
        try:
            await sender.open(UPDATE)
            await sender.close()
            assert (left / "model-00000.safetensors").exists()  # it lives
        finally:
            trainer.kill()
    await sender.open(UPDATE)
    assert not left.exists()
    another = t.DiskSender(tmp_path)
    await another.open(UPDATE)
    assert len([*tmp_path.glob(f"version-*/{LOCK}")]) == 2
    await another.close()
    await sender.close()
    assert sorted(tmp_path.iterdir()) == sorted(mine)
    assert all((path / "model.safetensors").read_bytes() == b"mine" for path in mine)


async def test_where_nothing_can_be_locked_an_update_is_sent_and_stays_another_ones(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int, how: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", refused)
    senders = [t.DiskSender(tmp_path), t.DiskSender(tmp_path)]
    for sender in senders:
        await sender.open(UPDATE)
    assert [len([*path.iterdir()]) for path in tmp_path.iterdir()] == [0, 0]
    for sender in senders:
        await sender.close()
    assert list(tmp_path.iterdir()) == []
