"""New weights for an engine where both it and the trainer are on the device."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")


def synced(folder: str, rounds: int, deltas: bool) -> list[tuple[bool, float, list[int]]]:
    """Runs on a rank: after each sync, whether the engine serves what the trainer has, and a
    pause."""
    from benchmarks.weight_sync import _model, _train
    from megatron_idempotent.rl.engines import Request
    from megatron_idempotent.rl.engines.transformers import TransformersEngine
    from megatron_idempotent.rl.hf import MegatronWeights
    from megatron_idempotent.rl.sync import SyncSettings, WeightSync

    chunks, arch = _model(Path(folder), 128)
    engine = TransformersEngine(Path(folder), device="cuda")
    source = MegatronWeights(chunks, arch, deltas=deltas)

    async def run() -> list[tuple[bool, float, list[int]]]:
        sync = WeightSync([engine], settings=SyncSettings(bucket_bytes=1 << 20))
        found = []
        for version in range(1, rounds + 1):
            _train(chunks)
            report = await sync.update(source, version, deltas=deltas)
            assert (report.decode_s > 0) == (deltas and version > 1)
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


@pytest.mark.parametrize("deltas", [False, True])
def test_an_engine_on_the_device_serves_each_version_to_the_bit(deltas, megatron_ranks, tmp_path):
    (found,) = megatron_ranks(1, synced, str(tmp_path), 3, deltas)
    for number, (same, _, versions) in enumerate(found, start=1):
        assert same
        assert set(versions) == {number}


def patched(dtypes: list[torch.dtype]) -> list[list[bool]]:
    """Runs on a rank: what holds of a delta between two tensors on the device, for each type."""
    from megatron_idempotent.rl.weights import Bucket
    from megatron_idempotent.rl.weights.deltas import EncodedDelta, apply, encode
    from megatron_idempotent.rl.weights.last_sent import LastSent
    from megatron_idempotent.rl.weights.records import DELTA, in_host_memory

    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1).view(torch.uint8)

    found = []
    for dtype in dtypes:
        # More than a block, a last word that is not whole, and a first one neither.
        size = (1 << 19) + 3
        memory = torch.randint(0, 256, ((size + 1) * dtype.itemsize,), dtype=torch.uint8).cuda()
        served = memory.view(dtype)[1:]
        old, new = served.clone(), served.clone()
        raw(new)[::97] ^= 129
        raw(new)[-1] ^= 1
        last = LastSent()
        last.changed(Bucket.of(0, {"w": old}), whole=True)
        sent = last.changed(Bucket.of(0, {"w": new}), whole=False).tensors
        delta = EncodedDelta(sent["w" + DELTA].cuda().cpu())  # as it comes from a device
        apply(delta, served)
        forth = torch.equal(raw(served), raw(new))
        apply(delta, served)
        once = torch.equal(raw(served), raw(new))
        apply(delta.undo(), served)
        found.append(
            [
                served.is_cuda and not in_host_memory(served),
                all(in_host_memory(each) for each in (delta.data, *last._tensors.values())),
                torch.equal(delta.data, encode(new, old).data),
                delta.nbytes < new.nbytes,
                forth,
                once,
                torch.equal(raw(served), raw(old)),
            ]
        )
    return found


def test_a_delta_of_tensors_on_the_device_is_written_there_in_place_and_undone(megatron_ranks):
    dtypes = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float64]
    assert megatron_ranks(1, patched, dtypes) == [[[True] * 7] * len(dtypes)]


def handed_over(versions: int) -> list[bool]:
    """Runs on two ranks with one GPU; returns whether rank 1 has received what rank 0 sent."""
    from megatron_idempotent.rl.weights import Bucket, WeightUpdate, checksum
    from megatron_idempotent.rl.weights.transports import CudaIpcSender, receiver

    group = dist.new_group(backend="gloo")

    def told(source: int, what: Any = None) -> Any:
        box = [what]
        dist.broadcast_object_list(box, src=source, group=group)
        return box[0]

    async def send() -> list[bool]:
        sender = CudaIpcSender()
        for version in range(versions):
            told(0, await sender.open(WeightUpdate(id=str(version), version=version)))
            for index in range(4):
                torch.manual_seed(10 * version + index)
                large, small = torch.randn(1 << 20, device="cuda"), torch.randn(3, device="cuda")
                bucket = Bucket.of(index, {"large": large, "small": small.bfloat16()})
                told(0, await sender.announce(bucket))
                told(1)
                await sender.release(bucket)
            await sender.close()
        return [True]

    if dist.get_rank() == 0:
        return asyncio.run(send())
    found = []
    for _ in range(versions):
        inbound = receiver(told(0))
        for _ in range(4):
            # What this process computes holds no copy up, and none is read before it is there.
            torch.cuda._sleep(20_000_000)
            bucket = inbound.receive(told(0))
            same = [checksum(each) == bucket.checksums[n] for n, each in bucket.tensors.items()]
            found.append(all(same) and all(each.is_cuda for each in bucket.tensors.values()))
            told(1)
        inbound.close()
    return found


@pytest.mark.gpu
def test_another_process_copies_buckets_out_of_the_trainers_memory(gpu_ranks):
    assert gpu_ranks(2, handed_over, 2) == [[True], [True] * 8]


def staged_beside(nbytes: int) -> tuple[bool, bool]:
    """Runs on a rank with a GPU: an engine's copies of an update, while the current stream is
    busy."""
    from megatron_idempotent.rl.engines.transformers_weights import Incoming, ServedWeights
    from megatron_idempotent.rl.weights import Bucket, WeightUpdate

    weights = torch.randint(0, 127, (nbytes,), dtype=torch.uint8, device="cuda")
    bucket = Bucket.of(0, {"w": weights})
    model = torch.nn.Module()
    model.register_buffer("w", torch.zeros_like(weights))
    model.device = weights.device
    incoming = Incoming(WeightUpdate(id="a", version=1), weights=ServedWeights(model))
    computed = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    computed.record()
    incoming.add(bucket)
    came_first = not computed.query()
    torch.cuda.synchronize()
    return torch.equal(incoming.complete()["w"], weights), came_first


@pytest.mark.gpu
def test_staging_does_not_wait_for_what_the_model_computes(gpu_ranks):
    assert gpu_ranks(1, staged_beside, 1 << 26) == [(True, True)]
