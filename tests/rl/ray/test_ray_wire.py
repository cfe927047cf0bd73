"""Messages to an actor and back, and their order: without a cluster."""

from __future__ import annotations

import asyncio
import pickle

import pytest
import torch

from megatron_idempotent.rl.engines.protocol import (
    EngineDead,
    EngineError,
    EngineTimeout,
    EngineUnsupported,
)
from megatron_idempotent.rl.engines.ray.actor import (
    BucketQueue,
    CallResult,
    HostedEngine,
    pack,
    unpack,
)
from megatron_idempotent.rl.engines.ray.buckets import hold, send
from megatron_idempotent.rl.weights import (
    Bucket,
    UpdateDamaged,
    UpdateMismatch,
    UpdateRefused,
    WeightsError,
    checksum,
)


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_bucket_arrives_as_it_was_sent_and_can_be_written():
    tensors = {
        "matrix": torch.randn(3, 5).T,
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
    }
    bucket = Bucket.of(4, tensors)
    packed = pack(bucket)
    for _, data in packed.tensors:
        data.flags.writeable = False  # as Ray hands arrays out
    found = unpack(packed)
    assert (found.index, found.checksums) == (4, bucket.checksums)
    assert list(found.tensors) == list(tensors)
    for name, tensor in found.tensors.items():
        assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape)
        assert checksum(tensor) == bucket.checksums[name]
        tensor.zero_()
    assert bucket.checksums == Bucket.of(4, tensors).checksums


@pytest.mark.parametrize(
    "kind",
    [
        EngineDead,
        EngineError,
        EngineTimeout,
        EngineUnsupported,
        UpdateDamaged,
        UpdateMismatch,
        UpdateRefused,
        WeightsError,
        ValueError,
    ],
)
def test_errors_come_back_in_their_own_class(kind):
    answer = pickle.loads(pickle.dumps(CallResult.of(kind("what it says"))))
    with pytest.raises(kind, match=r"^what it says$") as found:
        answer.unwrap("engine")
    assert type(found.value) is kind


class Local(EngineError):
    """A kind that only the engine's own process knows."""


def test_an_error_of_an_unknown_kind_comes_back_as_what_it_is_a_kind_of():
    with pytest.raises(EngineError, match=r"^own$") as found:
        CallResult.of(Local("own")).unwrap("engine")
    assert type(found.value) is EngineError


async def read(arrival):
    return [bucket.index async for bucket in arrival]


def test_buckets_that_come_in_another_order_are_read_in_their_own():
    async def scenario():
        arrival = BucketQueue()
        given = [pack(Bucket.of(index, {"a": torch.zeros(1)})) for index in range(3)]
        reading = asyncio.ensure_future(read(arrival))
        putting = []
        for place in (2, 0, 1):
            putting.append(asyncio.ensure_future(arrival.put(place, given[place])))
            for _ in range(5):
                await asyncio.sleep(0)
        await arrival.end(3)
        assert await reading == [0, 1, 2]
        await asyncio.gather(*putting)

    run(scenario)


def test_a_reader_that_ends_lets_all_go():
    async def scenario():
        arrival = BucketQueue()
        packed = pack(Bucket.of(0, {"a": torch.zeros(1)}))
        putting = asyncio.ensure_future(arrival.put(0, packed))
        asking = asyncio.ensure_future(arrival.wanted())
        await asyncio.sleep(0)
        await arrival.close()
        await putting
        assert not await asking
        assert [bucket async for bucket in arrival] == []

    run(scenario)


class Slow:
    """An engine of which nothing ends by itself."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0

    async def generate(self, request):
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1


def test_a_call_can_be_given_up_while_it_runs_and_before_it_begins():
    async def scenario():
        hosted = HostedEngine()
        hosted._engine = engine = Slow()
        call = asyncio.ensure_future(hosted.call(0, "generate", ("request",)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert engine.begun == 1
        await hosted.give_up(0)
        assert engine.ended == 1
        assert (await call).kind
        await hosted.give_up(1)  # Ray may bring it before the call
        assert (await hosted.call(1, "generate", ("request",))).kind
        assert engine.begun == 1

    run(scenario)


class Store:
    """Stands where Ray would keep buckets."""

    def __init__(self, room=99) -> None:
        self.kept = []
        self._room = room

    def put(self, packed):
        if len(self.kept) == self._room:
            raise MemoryError("full")
        self.kept.append(packed)
        return len(self.kept) - 1


def test_a_bucket_for_several_engines_is_stored_once_and_no_longer_than_it_is_wanted():
    async def scenario():
        store = Store()
        first, second = (Bucket.of(index, {"a": torch.ones(1)}) for index in range(2))
        held = await asyncio.gather(*(hold(store, first) for _ in range(3)))
        assert {each.ref for each in held} == {0}
        assert (await hold(store, second)).ref == 1
        for each in held:
            each.release()
        assert (await hold(store, first)).ref == 2
        assert len(store.kept) == 3

    run(scenario)


def test_a_store_without_room_is_an_error_for_all_and_not_for_later():
    async def scenario():
        store = Store(room=0)
        bucket = Bucket.of(0, {"a": torch.ones(1)})
        found = await asyncio.gather(
            *(hold(store, bucket) for _ in range(2)), return_exceptions=True
        )
        assert [type(each) for each in found] == [MemoryError, MemoryError]
        assert (await hold(Store(), bucket)).ref == 0

    run(scenario)


def test_what_a_sender_frees_behind_the_next_bucket_has_been_copied():
    async def scenario():
        tensor = torch.zeros(4)
        arrived, ends = [], []

        async def reused():
            for index in range(4):
                tensor.fill_(index)
                yield Bucket.of(index, {"a": tensor})

        class Copies:
            async def hold(self, bucket):
                return await hold(CopyingStore(), bucket)

            async def put(self, place, held):
                await asyncio.sleep(0)
                arrived.append((place, unpack(held.ref).tensors["a"].tolist()))

            async def end(self, count):
                ends.append(count)

        await send(reused(), Copies(), asyncio.get_running_loop().create_future())
        assert sorted(arrived) == [(place, [float(place)] * 4) for place in range(4)]
        assert ends == [4]

    run(scenario)


class CopyingStore:
    """Keeps what it was given at that moment, as Ray's does."""

    def put(self, packed):
        return pickle.loads(pickle.dumps(packed))
