"""Folders that `DiskSender.finish` makes whole checkpoints of."""

from __future__ import annotations

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


@pytest.mark.parametrize("keep", [False, True])
async def test_a_finished_folder_is_a_complete_checkpoint_and_goes_unless_it_is_kept(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, keep: bool
) -> None:
    buckets = [BUCKET, Bucket.of(1, {"v": torch.zeros(5, dtype=torch.bfloat16)})]
    sender = t.DiskSender(tmp_path / "weights", like=checkpoint, keep=keep)
    await sender.open(UPDATE)
    for bucket in buckets:
        await sender.announce(bucket)
        await sender.release(bucket)
    folder = await sender.finish()
    texts = {path.name: path.read_text() for path in folder.iterdir() if path.suffix == ".json"}
    assert len(list(folder.iterdir())) == len(texts) + len(buckets)
    await sender.close()
    assert texts["config.json"] == "the checkpoint's config.json"
    assert sorted(texts) == ["config.json", "model.safetensors.index.json", "tokenizer.json"]
    index = json.loads(texts["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == sum(bucket.nbytes for bucket in buckets)
    assert folder.exists() is keep
    for bucket in buckets if keep else ():
        for name, tensor in bucket.tensors.items():
            assert torch.equal(load_file(folder / index["weight_map"][name])[name], tensor)


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
