"""Folders that `DiskSender.finish` makes whole checkpoints of."""

from __future__ import annotations

import asyncio
import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file

from megatron_idempotent.rl.weights import Bucket, WeightUpdate
from megatron_idempotent.rl.weights import transports as t

UPDATE = WeightUpdate(id="run/1", version=1)
BUCKET = Bucket.of(0, {"w": torch.arange(100.0), "b": torch.ones(3)})


@pytest.fixture
def checkpoint(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "checkpoint"
    (folder / "original").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin"):
        (folder / name).write_text(f"the checkpoint's {name}")
    for name in ("model.safetensors", "pytorch_model.bin"):
        (folder / f"{name}.index.json").write_text("the checkpoint's index")
    return folder


def finished(sender: t.DiskSender, buckets: list[Bucket]) -> tuple[pathlib.Path, dict[str, str]]:
    """The folder that `finish` names, and its files but the weights, read before `close`."""

    async def scenario() -> tuple[pathlib.Path, dict[str, str]]:
        await sender.open(UPDATE)
        for bucket in buckets:
            await sender.announce(bucket)
            await sender.release(bucket)
        folder = await sender.finish()
        texts = {path.name: path.read_text() for path in folder.iterdir() if path.suffix == ".json"}
        assert len(list(folder.iterdir())) == len(texts) + len(buckets)
        await sender.close()
        return folder, texts

    return asyncio.run(scenario())


def test_a_finished_folder_is_a_complete_checkpoint(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path
) -> None:
    buckets = [BUCKET, Bucket.of(1, {"v": torch.zeros(5, dtype=torch.bfloat16)})]
    sender = t.DiskSender(tmp_path / "weights", like=checkpoint, keep=True)
    folder, texts = finished(sender, buckets)
    assert texts["config.json"] == "the checkpoint's config.json"
    assert sorted(texts) == ["config.json", "model.safetensors.index.json", "tokenizer.json"]
    index = json.loads(texts["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == sum(bucket.nbytes for bucket in buckets)
    for bucket in buckets:
        for name, tensor in bucket.tensors.items():
            kept = load_file(folder / index["weight_map"][name])  # after close()
            assert torch.equal(kept[name], tensor)


def test_a_finished_folder_goes_with_the_update_unless_it_is_kept(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path
) -> None:
    folder, _ = finished(t.DiskSender(tmp_path / "weights", like=checkpoint), [BUCKET])
    assert not folder.exists()


async def test_a_folder_that_was_not_finished_is_not_kept(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path
) -> None:
    sender = t.DiskSender(tmp_path / "weights", like=checkpoint, keep=True)

    await sender.open(UPDATE)
    await sender.announce(BUCKET)
    await sender.close()
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_checkpoint_without_config_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json; give the folder"):
        t.DiskSender(tmp_path, like=tmp_path)
    with pytest.raises(ValueError, match="keep=True and like=None"):
        t.DiskSender(tmp_path, keep=True)


async def test_finish_without_a_checkpoint_is_an_error(tmp_path: pathlib.Path) -> None:
    sender = t.DiskSender(tmp_path)
    with pytest.raises(t.TransportError, match=r"finish\(\) has no update"):
        await sender.finish()
    await sender.open(UPDATE)
    with pytest.raises(t.TransportError, match="like=a checkpoint's folder"):
        await sender.finish()
    await sender.close()
