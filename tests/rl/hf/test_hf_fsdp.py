"""Weights of a transformers model under FSDP2: those of its checkpoint, and those of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks

from megatron_idempotent.rl.hf import FSDPWeights


def sharded(root: Any, name: str) -> Any:
    """Runs on a rank: the checkpoint's model, each layer sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(root / name, dtype="auto")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@on_ranks(2)
def test_weights_under_fsdp_have_the_names_and_values_of_the_checkpoint(checkpoints: Any) -> None:
    """Runs on two ranks."""
    import hf_checkpoints
    import hf_programs

    first = torch.distributed.get_rank() == 0
    for name in ("qwen2-tied", "moe", "moe-half"):
        model = sharded(checkpoints, name)
        stored = hf_programs.stored(checkpoints / name)
        found = hf_programs.exported(FSDPWeights(model))
        if first:
            hf_programs.same(found, stored)
        found = hf_programs.exported(FSDPWeights(model, dtype=torch.bfloat16))
        if first:
            hf_programs.same(found, {each: t.bfloat16() for each, t in stored.items()})
    model = sharded(checkpoints, "qwen2-tied")
    model.set_reshard_after_forward(False)
    shards = list(model.parameters())  # as an optimizer has them
    model(hf_checkpoints.tokens_BT())  # which leaves parameters whole
    with torch.no_grad():
        for shard in shards:
            shard.add_(1.0)
    source = FSDPWeights(model)
    stored = hf_programs.stored(checkpoints / "qwen2-tied")
    for _ in range(2):
        if first:
            with source.buckets(bucket_bytes=3000) as buckets:
                next(buckets)
        else:
            list(source.buckets(bucket_bytes=3000))
        found = hf_programs.exported(source)
        if first:
            hf_programs.same(found, {each: tensor + 1.0 for each, tensor in stored.items()})


def test_buckets_are_copies_on_one_process_too(checkpoints):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoints / "moe")
    (bucket,) = FSDPWeights(model).buckets(bucket_bytes=1 << 30)
    kept = {name: tensor.clone() for name, tensor in bucket.tensors.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(bucket.tensors[name], kept[name]) for name in kept)


def test_what_cannot_be_exported_is_refused():
    model = torch.nn.Module()
    model.kernel = torch.nn.Parameter(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=r"kernel has shape \[2, 3, 4\]"):
        FSDPWeights(model)
    with pytest.raises(ValueError, match=r"dtype=torch\.int8"):
        FSDPWeights(torch.nn.Linear(2, 2), dtype=torch.int8)
