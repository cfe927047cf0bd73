"""New weights for an engine where both it and the trainer are on the device."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")


def synced(folder: str, rounds: int) -> list[tuple[bool, float, list[int]]]:
    """On a rank: after each sync, whether the engine serves what the trainer has, and a pause."""
    import asyncio
    from pathlib import Path

    import torch

    from benchmarks.weight_sync import _model, _train
    from megatron_idempotent.models import MegatronWeights
    from megatron_idempotent.rollout import Request
    from megatron_idempotent.rollout.local import TransformersEngine
    from megatron_idempotent.sync import SyncSettings, WeightSync

    chunks, arch = _model(Path(folder), 128)
    engine = TransformersEngine(Path(folder), device="cuda")
    source = MegatronWeights(chunks, arch)

    async def run() -> list[tuple[bool, float, list[int]]]:
        sync = WeightSync([engine], settings=SyncSettings(bucket_bytes=1 << 20))
        found = []
        for version in range(1, rounds + 1):
            _train(chunks)
            report = await sync.update(source, version)
            request = Request(id=str(version), prompt=(1, 2, 3), max_tokens=4, seed=version)
            sample = await engine.generate(request)
            sent = {
                name: tensor
                for bucket in source.buckets(bucket_bytes=1 << 30)
                for name, tensor in bucket.tensors.items()
            }
            served = engine._updates._weights._tensors
            same = [torch.equal(served[name].cpu(), sent[name].cpu()) for name in served]
            assert len(same) > 10
            found.append((all(same), report.pause_s, list(sample.versions)))
        await engine.close()
        return found

    return asyncio.run(run())


def test_an_engine_on_the_device_serves_each_version_to_the_bit(megatron_ranks, tmp_path):
    (found,) = megatron_ranks(1, synced, str(tmp_path), 3)
    for number, (same, _, versions) in enumerate(found, start=1):
        assert same
        assert set(versions) == {number}


def handed_over(nbytes: int) -> Any:
    """On two ranks with one GPU: rank 0's memory, opened and read by rank 1 without a copy."""
    import pickle

    import torch
    import torch.distributed as dist
    from torch.multiprocessing.reductions import reduce_tensor

    group = dist.new_group(backend="gloo")
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        weights = torch.arange(nbytes // 4, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        told = [pickle.dumps(reduce_tensor(weights))]
    dist.broadcast_object_list(told, src=0, group=group)
    if dist.get_rank() == 0:
        dist.barrier(group)  # the memory is here until it is read
        return True
    rebuild, arguments = pickle.loads(told[0])
    theirs = rebuild(*arguments)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    mine = theirs.clone()
    end.record()
    end.synchronize()
    right = bool((mine == torch.arange(nbytes // 4, dtype=torch.int32, device="cuda")).all())
    print(f"CUDA IPC: {nbytes / start.elapsed_time(end) / 1e6:.0f} GB/s")
    del theirs
    dist.barrier(group)
    return right


@pytest.mark.gpu
def test_another_process_reads_device_memory_by_its_handle(gpu_ranks):
    assert gpu_ranks(2, handed_over, 1 << 28) == [True, True]


def staged_beside(nbytes: int) -> tuple[bool, float]:
    """On a rank with a GPU: a copy to pinned memory on a side stream, beside a busy main one."""
    import torch

    source = torch.randint(0, 127, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    side, copied, computed = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    torch.cuda.synchronize()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(2_000_000_000)  # about a second
    computed.record()
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
        copied.record()
    copied.synchronize()
    done_first = not computed.query()
    torch.cuda.synchronize()
    return torch.equal(target, source.cpu()), float(done_first)


@pytest.mark.gpu
def test_a_copy_on_a_side_stream_does_not_wait_for_the_main_one(gpu_ranks):
    assert gpu_ranks(1, staged_beside, 1 << 26) == [(True, 1.0)]
