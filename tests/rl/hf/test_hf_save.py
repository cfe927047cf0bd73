"""Checkpoints that are written: those that were read, and none that is half-written."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_idempotent.rl.hf import CheckpointMismatch, MegatronWeights, save_hf
from megatron_idempotent.rl.weights import Bucket, TensorInfo


class Failing:
    """A source of some tensors, which goes wrong; no ranks and no Megatron."""

    def __init__(self, tensors: dict[str, Any], *, drop: int = 0, error: Any = None) -> None:
        self._tensors, self._drop, self._error = tensors, drop, error

    def tensors(self) -> Any:
        return tuple(TensorInfo.of(name, tensor) for name, tensor in self._tensors.items())

    def buckets(self, *, bucket_bytes: int) -> Any:
        there = list(self._tensors.items())[: len(self._tensors) - self._drop]
        for index, (name, tensor) in enumerate(there):
            if self._error is not None and index == 3:
                raise self._error
            yield Bucket.of(index, {name: tensor})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def saved(root: Any, target: Any, name: str, layout: dict[str, int], half: bool) -> None:
    """Runs on a rank: load and save, in one file and in several."""
    import hf_programs

    hf_programs.parallel(**layout)
    arch, _, chunks = hf_programs.loaded(root / name)
    source = MegatronWeights(chunks, arch)
    save_hf(source, target / "one", like=root / name, bucket_bytes=4000)
    parts = {"max_shard_bytes": 20_000, "bucket_bytes": 3000}
    save_hf(source, target / "parts", like=root / name, **parts)
    narrow = MegatronWeights(chunks, arch, dtype=torch.bfloat16)
    first = torch.distributed.get_rank() == 0
    with pytest.raises(ValueError, match="one exists: pass replace=True" if first else "rank 0: V"):
        save_hf(narrow, target / "one", like=root / name)
    if not half:
        save_hf(narrow, target / "parts", like=root / name, replace=True)


@pytest.mark.parametrize(
    ("name", "ranks", "layout"), [("qwen3", 2, {"tp": 2}), ("moe-half", 2, {"pp": 2})]
)
def test_what_is_loaded_and_saved_is_the_same_checkpoint(
    megatron_ranks, checkpoints, tmp_path, name, ranks, layout
):
    import hf_checkpoints
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    (checkpoints / name / "tokenizer.json").write_text("{}")
    half = name.endswith("-half")
    megatron_ranks(ranks, saved, checkpoints, tmp_path, name, layout, half)
    like, one, parts = checkpoints / name, tmp_path / "one", tmp_path / "parts"
    # To the byte: header, order and alignment are those of safetensors.
    weights = "model.safetensors"
    assert (one / weights).read_bytes() == (like / weights).read_bytes()
    assert names(one) == [each for each in names(like) if not each.startswith("logits")]
    for file in ("config.json", "generation_config.json"):
        assert json.loads((one / file).read_text()) == json.loads((like / file).read_text())
    assert names(tmp_path) == ["one", "parts"]
    model = AutoModelForCausalLM.from_pretrained(parts, experts_implementation="eager").eval()
    assert model.dtype is torch.bfloat16
    assert not (parts / weights).exists() or not half
    if half:
        index = json.loads((parts / "model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        assert files == [each for each in names(parts) if each.startswith("model-")]
        count = len(files)
        assert count > 2
        assert files == [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
        loaded = [load_file(parts / file) for file in files]
        sizes = [sum(tensor.nbytes for tensor in each.values()) for each in loaded]
        assert index["metadata"]["total_size"] == sum(sizes)
        assert max(sizes) <= 20_000
        for file, tensors in zip(files, loaded, strict=True):
            assert all(index["weight_map"][each] == file for each in tensors)
        reference = AutoModelForCausalLM.from_pretrained(
            like, experts_implementation="eager"
        ).eval()
        wanted = hf_checkpoints.logits_of(reference)
        assert torch.equal(hf_checkpoints.logits_of(model), wanted)


def test_a_checkpoint_that_cannot_be_finished_leaves_nothing(checkpoints, tmp_path):
    from safetensors.torch import load_file

    like = checkpoints / "llama"
    tensors = load_file(like / "model.safetensors")
    for source, kind, said in (
        (Failing(tensors, drop=2), ValueError, "model.norm.weight"),
        (Failing(tensors, error=OSError(errno.ENOSPC, "full")), OSError, "full"),
        (Failing(tensors, error=ValueError("not finite")), ValueError, "not finite"),
    ):
        with pytest.raises(kind, match=said):
            save_hf(source, tmp_path / "new", like=like)
        with pytest.raises(kind, match=said):
            save_hf(source, tmp_path / "new", like=like, max_shard_bytes=5000)
        assert names(tmp_path) == []
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5]
    tensors["more"] = tensors.pop("lm_head.weight")
    with pytest.raises(CheckpointMismatch) as caught:
        save_hf(Failing(tensors), tmp_path / "new", like=like)
    for part in ("lm_head.weight is missing", "model.norm.weight is [5], ", "more is [51, 24], "):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="max_shard_bytes=0; allowed: 1 or more"):
        save_hf(Failing({}), tmp_path / "new", like=like, max_shard_bytes=0)
    assert names(tmp_path) == []


def test_a_checkpoint_that_is_replaced_stays_until_the_new_one_is_complete(checkpoints, tmp_path):
    from safetensors.torch import load_file

    like = checkpoints / "llama"
    tensors = load_file(like / "model.safetensors")
    target = tmp_path / "deep" / "model"
    config = {"quantization_config": {"quant_method": "fp8"}}
    save_hf(Failing(tensors), target, like=like, config_changes=config)
    assert json.loads((target / "config.json").read_text())["quantization_config"]
    before = os.stat(target).st_ino
    with pytest.raises(OSError, match="full"):
        save_hf(Failing(tensors, error=OSError(28, "full")), target, like=like, replace=True)
    assert os.stat(target).st_ino == before
    # Killed between its two renames: the older one comes back, until there is a whole new one.
    target.rename(target.with_name(".model.replaced"))
    target.with_name(".model.writing").mkdir()
    with pytest.raises(OSError, match="full"):
        save_hf(Failing(tensors, error=OSError(28, "full")), target, like=like, replace=True)
    assert os.stat(target).st_ino == before
    assert names(target.parent) == ["model"]
    # Itself as what it is like.
    save_hf(Failing(tensors), target, like=target, replace=True)
    assert os.stat(target).st_ino != before
    assert names(target.parent) == ["model"]
    assert load_file(target / "model.safetensors").keys() == tensors.keys()


class Fresh(Failing):
    """Makes each tensor when it is asked for, and notes whether the one before it is still held."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        super().__init__(tensors)
        self.held: list[bool] = []

    def buckets(self, *, bucket_bytes: int) -> Any:
        import weakref

        before: Any = lambda: None  # noqa: E731 - as a dead reference
        for index, name in enumerate(self._tensors):
            self.held.append(before() is not None)
            bucket = Bucket.of(index, {name: self._tensors[name].clone()})
            before = weakref.ref(bucket.tensors[name])
            whole = [bucket]
            del bucket
            yield whole.pop()


def test_no_bucket_is_held_while_the_next_one_is_made(checkpoints, tmp_path):
    from safetensors.torch import load_file

    like = checkpoints / "llama"
    source = Fresh(load_file(like / "model.safetensors"))
    save_hf(source, tmp_path / "new", like=like)
    assert len(source.held) == len(source.tensors())
    assert not any(source.held)
