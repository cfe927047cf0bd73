"""Manifests and announcements with something else in them: the right bits, or an error by name."""

from __future__ import annotations

import copy
import json
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("zstandard")

import torch
from bucket_case import SHAPES, Trainer, WeightsEngine, follower, index_of

from megatron_idempotent.rl.sync import SyncError
from megatron_idempotent.rl.weights import (
    Bucket,
    Staging,
    TensorInfo,
    UpdateDamaged,
    WeightsError,
    WeightUpdate,
)
from megatron_idempotent.rl.weights import transports as t
from megatron_idempotent.rl.weights.transports.bucket import Objects

NESTED: Any = []
for _ in range(100):
    NESTED = [NESTED]
VALUES = (
    *(None, True, -1, 0, 1, 7, 2**40, 2**62, 2**63, 2**70, 0.5, float("nan"), float("inf")),
    *("", "x", "\0", "\ud800", "bfloat16", "qint8", "embed", "embed:delta", "../../latest.json"),
    *([], {}, [None], [[]], {"a": 1}, NESTED),
)
#: What a caller learns nothing from.
UNNAMED = "KeyError", "TypeError", "AttributeError", "RecursionError", "MemoryError", "RuntimeError"


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a document with each of its keys."""
    for key in list(document) if isinstance(document, dict) else range(len(document)):
        yield document, key
        if isinstance(document[key], (dict, list)):
            yield from places(document[key])


def mutant(document: Any, chance: random.Random) -> Any:
    """A copy of a document in which one or two places have changed."""
    made = copy.deepcopy(document)
    for _ in range(chance.choice([1, 1, 2])):
        holder, key = chance.choice(list(places(made)))
        value, how = holder[key], chance.randrange(6)
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(holder, list):
            holder.insert(chance.randrange(len(holder) + 1), copy.deepcopy(value))
        elif how == 2 and isinstance(value, int):
            holder[key] = value + chance.choice([-1, 1, 64])
        elif how == 3:
            other, place = chance.choice(list(places(made)))
            holder[key] = copy.deepcopy(other[place])
        else:
            holder[key] = copy.deepcopy(chance.choice(VALUES))
        if not made:
            break
    return made


def named(error: BaseException, *, seed: int) -> None:
    assert isinstance(error, (WeightsError, t.TransportError, SyncError)), (seed, repr(error))
    if isinstance(error, SyncError):  # it has the engine's own
        assert not any(each in str(error) for each in UNNAMED), (seed, error)


async def test_a_manifest_with_something_else_in_it_is_the_right_bits_or_an_error_by_name(
    place: str,
) -> None:
    told = {"right": 0, "refused": 0}
    trainer, objects = Trainer(place), Objects(place)
    await trainer.steps(3)
    listed = objects.read("latest.json")
    assert listed is not None
    for seed in range(400):
        chance = random.Random(seed)
        entry = chance.choice(index_of(objects).updates)
        manifest = json.loads(objects.get(entry.manifest))
        content = json.dumps(mutant(manifest, chance)).encode()
        if seed % 50 == 0:
            content = b"[" * 100_000
        key = objects.put("manifests/", content)
        objects.write("latest.json", listed.replace(entry.manifest.encode(), key.encode()))
        engine = WeightsEngine()
        before = engine.bits
        try:
            await follower(place, engine).catch_up()
        except Exception as error:  # noqa: BLE001 (its class is what is tested)
            named(error, seed=seed)
            assert engine.bits == before
            told["refused"] += 1
        else:
            assert engine.bits == trainer.bits_of[3], seed
            told["right"] += 1
        objects.write("latest.json", listed)
    assert told["refused"] > 200, told
    assert told["right"], told


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda manifest: manifest["buckets"].pop(1), "without {}; publish everything"),
        (lambda manifest: manifest["buckets"].reverse(), "not the same in the same order; publish"),
        (lambda manifest: manifest["update"].update(kv_scales={"a": 1}), "kv_scales has names"),
    ],
    ids=["bucket", "order", "scales"],
)
@pytest.mark.parametrize("entry", [0, -1], ids=["anchor", "delta"])
async def test_a_manifest_says_what_is_wrong_with_it(
    place: str, entry: int, change: Any, said: str
) -> None:
    trainer, objects = Trainer(place), Objects(place)
    await trainer.steps(2)
    listed, key = objects.read("latest.json"), index_of(objects).updates[entry].manifest
    manifest = json.loads(objects.get(key))
    second = [repr(each["name"]) for each in manifest["buckets"][1]["tensors"]]
    change(manifest)
    mutated = objects.put("manifests/", json.dumps(manifest).encode())
    objects.write("latest.json", listed.replace(key.encode(), mutated.encode()))
    with pytest.raises(UpdateDamaged, match=said.format(", ".join(second))):
        await follower(place, WeightsEngine()).catch_up()


SENT = {name: torch.ones(shape).to(dtype) for name, (shape, dtype) in SHAPES.items()}


@pytest.mark.parametrize("kind", ["disk", "shared_memory", "bucket", "process_group"])
async def test_an_announcement_with_something_else_in_it_is_the_right_bits_or_an_error_by_name(
    kind: str, tmp_path: pathlib.Path
) -> None:
    told = {"right": 0, "refused": 0}
    update = WeightUpdate(id="run/1", version=1)
    infos = [TensorInfo.of(name, tensor) for name, tensor in SENT.items()]
    made = {
        "disk": lambda: t.DiskSender(tmp_path),
        "shared_memory": t.SharedMemorySender,
        "bucket": lambda: t.BucketSender(str(tmp_path)),
        "process_group": lambda: t.ProcessGroupSender("127.0.0.1"),
    }
    sender = made[kind]()
    opened, bucket = dict(await sender.open(update)), Bucket.of(0, SENT)
    announced = {} if kind == "process_group" else dict(await sender.announce(bucket))
    for seed in range(300):
        chance = random.Random(seed)
        two = mutant({"opened": opened, "announced": announced}, chance)
        staging = Staging(update, expected=infos)
        try:
            inbound = t.receiver(two.get("opened"), expected=infos, bucket=str(tmp_path))
            if kind == "process_group":  # it connects with the first bucket
                continue
            staging.add(inbound.receive(two.get("announced")))
            arrived = staging.complete()
        except Exception as error:  # noqa: BLE001 (its class is what is tested)
            named(error, seed=seed)
            told["refused"] += 1
        else:
            assert all(torch.equal(arrived[name], SENT[name]) for name in SENT), seed
            told["right"] += 1
    await sender.close()
    assert told["refused"] > 100, told
