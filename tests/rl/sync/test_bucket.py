"""A trainer publishes in a bucket, and engines take it from there; all are compared by bits."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

pytest.importorskip("torch")
pytest.importorskip("zstandard")

from bucket_case import SHAPES, Trainer, WeightsEngine, bits, follower, index_of, unneeded

from megatron_idempotent.rl.engines import EngineError, EngineUnsupported, Request
from megatron_idempotent.rl.sync import BucketPublisher, SyncFailed, WeightSync
from megatron_idempotent.rl.weights import UpdateDamaged, UpdateRefused
from megatron_idempotent.rl.weights.chains import Manifest
from megatron_idempotent.rl.weights.transports.bucket import Objects


@pytest.mark.parametrize("kind", ["memory", "folder"])
async def test_an_engine_has_the_trainers_bits_after_each_update(
    place: str, kind: str, tmp_path
) -> None:
    place = place if kind == "memory" else str(tmp_path / "weights")
    trainer, engine = Trainer(place), WeightsEngine()
    following = follower(place, engine)
    assert await following.catch_up() is None
    for version in range(1, 7):
        await trainer.steps(1)
        found = await following.catch_up()
        assert (found.version, found.updates) == (version, 1)
        assert found.whole == (version in (1, 5))
        assert engine.bits == bits(trainer.tensors)
    assert await following.catch_up() is None
    assert engine.pauses == 6
    assert unneeded(Objects(place)) == set()


async def test_a_follower_of_nothing_says_so_once_and_one_of_what_was_emptied_refuses(
    place: str,
    caplog,
) -> None:
    following = follower(place, WeightsEngine())
    for _ in range(2):
        assert await following.catch_up() is None
    (told,) = (each.getMessage() for each in caplog.records if each.levelname == "WARNING")
    assert told.startswith(f"{place} has no latest.json, which a publisher writes")
    await Trainer(place).steps(1)
    await following.catch_up()
    Objects(place).remove(["latest.json"])
    with pytest.raises(UpdateRefused, match="had version 1"):
        await following.catch_up()


@pytest.mark.parametrize(
    ("missed", "updates", "whole"),
    [(2, 2, False), (3, 1, True), (6, 4, True)],
    ids=["the chain", "the anchor", "the anchor and the chain after it"],
)
async def test_an_engine_that_missed_updates_takes_them_in_one_pause(
    place: str, missed: int, updates: int, whole: bool, caplog
) -> None:
    trainer, engine, following = await Trainer.followed(place, 2)
    late = WeightsEngine("late")
    await trainer.steps(missed)
    with caplog.at_level(logging.INFO):
        found = await following.catch_up()
    assert (found.updates, found.whole, engine.pauses) == (updates, whole, 2)
    listed = index_of(Objects(place)).updates[-updates:]
    assert found.bytes_read == sum(each.nbytes for each in listed) > 0
    assert engine.bits == bits(trainer.tensors)
    assert f"{found.bytes_read / 1e6:.3f} MB in {found.total_s:.2f} s" in caplog.text
    # One that joins only now, beside it.
    both = follower(place, engine, late)
    assert set((await both.catch_up()).engines) == {"engine", "late"}
    assert late.bits == engine.bits
    assert engine.pauses == 2


async def test_an_engine_with_other_bits_than_its_version_has_gets_the_anchor_by_itself(
    place: str,
) -> None:
    trainer, engine, following = await Trainer.followed(place, 1)
    engine.model.state_dict(keep_vars=True)["up"].data.view(-1)[3] = 7.0
    await trainer.steps(1)
    found = await following.catch_up()
    assert (found.updates, found.whole) == (1 + 2, True)
    assert engine.bits == bits(trainer.tensors)


async def test_a_delta_is_a_small_part_of_an_anchor_and_an_anchor_comes_on_demand(
    place: str,
) -> None:
    trainer = Trainer(place, anchor_every=100)
    await trainer.steps(2)
    trainer.publisher.ask_for_anchor()
    await trainer.steps(2)
    await trainer.publish(deltas=False)
    listed = index_of(Objects(place)).updates
    assert [each.base_version for each in listed] == [None, 3, None]
    assert listed[1].nbytes < listed[0].nbytes / 2


async def test_old_updates_are_removed_and_what_is_listed_can_be_read(place: str) -> None:
    trainer, objects = Trainer(place, anchor_every=3, anchors=2), Objects(place)
    for _ in range(14):
        await trainer.steps(1)
        index = index_of(objects)
        assert len(index.anchors) <= 2
        assert index.anchors[0] == 0
        for listed in index.updates:
            manifest = Manifest(objects, index.run, listed)
            for name in manifest.places:
                manifest.bucket(name)
    await trainer.publish()
    assert unneeded(objects) == set()


async def test_scales_of_a_cache_go_with_the_update(place: str) -> None:
    trainer = Trainer(place)
    await trainer.sync.update(trainer, 1, kv_scales={"model.layers.0.self_attn.k_scale": 0.5})
    objects = Objects(place)
    index = index_of(objects)
    assert Manifest(objects, "run", index.newest).kv_scales == {
        "model.layers.0.self_attn.k_scale": 0.5
    }


async def test_the_publisher_stands_beside_engines_and_an_abort_reaches_no_follower(
    place: str,
) -> None:
    trainer, near, far = Trainer(place), WeightsEngine("near"), WeightsEngine("far")
    trainer.sync = WeightSync([near, trainer.publisher])
    following = follower(place, far)
    await trainer.steps(2)
    await following.catch_up()
    assert near.bits == far.bits == trainer.bits_of[2]
    trainer.step()
    trainer.fails_at = 1
    with pytest.raises(OSError, match="the other rank is gone"):
        await trainer.publish()
    assert await following.catch_up() is None
    await trainer.publish()
    await following.catch_up()
    assert near.bits == far.bits == trainer.bits_of[4]
    assert unneeded(Objects(place)) == set()


async def test_a_trainer_that_is_started_again_goes_on_with_an_anchor(place: str) -> None:
    trainer, engine, following = await Trainer.followed(place, 2)
    trainer.start_again()
    assert (await trainer.sync.recover())[place].version == 2
    await trainer.steps(2)
    assert [each.base_version for each in index_of(Objects(place)).updates] == [
        None,
        1,
        None,
        3,
    ]
    await following.catch_up()
    assert engine.bits == bits(trainer.tensors)


async def test_an_old_list_before_it_begins_does_not_keep_a_trainer_out(place: str) -> None:
    trainer, objects, engine = Trainer(place), Objects(place), WeightsEngine()
    await trainer.steps(1)
    old = objects.read("latest.json")
    await trainer.steps(1)
    trainer.start_again()
    newest = objects.read("latest.json")
    objects.write("latest.json", old)
    assert (await trainer.publisher.health()).version == 1
    objects.write("latest.json", newest)
    await trainer.steps(1)
    await follower(place, engine).catch_up()
    assert engine.bits == trainer.bits_of[3]


async def test_another_run_and_a_second_trainer_are_refused_by_name(place: str) -> None:
    trainer, engine = Trainer(place), WeightsEngine()
    await trainer.steps(2)
    other = Trainer(place, run="other")
    with pytest.raises(SyncFailed, match=r"'run'.*'other'"):
        await other.publish()
    with pytest.raises(UpdateRefused, match=r"'run'.*'mine'"):
        await follower(place, engine, run="mine").catch_up()
    # A second trainer of the same name, between this one's staging and its commit.
    second = Trainer(place)
    second.version = 2
    write = trainer.publisher._objects.write

    def late(key: str, content: bytes) -> None:
        write(key, content)
        if key.startswith("manifests/"):
            trainer.publisher._objects.write = write
            asyncio.run(second.publish())

    trainer.publisher._objects.write = late
    trainer.step()
    with pytest.raises(SyncFailed, match="version 3, which this trainer did not"):
        await trainer.publish()
    await follower(place, engine).catch_up()
    assert engine.bits == second.bits_of[3]
    engine.versions._last = 9
    with pytest.raises(UpdateRefused, match=r"version 9, and memory://.* has 3"):
        await follower(place, engine).catch_up()


async def test_a_trainer_that_another_one_has_replaced_lists_nothing_that_it_removed(
    place: str,
) -> None:
    trainer, engine, following = await Trainer.followed(place, 2)
    second = Trainer(place)
    second.version, second.fails_at = 2, 1
    write = trainer.publisher._objects.write

    def late(key: str, content: bytes) -> None:
        write(key, content)
        if key.startswith("manifests/"):  # it begins, removes what is not listed, and fails
            trainer.publisher._objects.write = write
            with pytest.raises(OSError, match="the other rank is gone"):
                asyncio.run(second.publish())

    trainer.publisher._objects.write = late
    trainer.step()
    for _ in range(2):
        with pytest.raises(SyncFailed, match="another trainer"):
            await trainer.publish()
    assert await following.catch_up() is None
    assert engine.bits == trainer.bits_of[2]
    await second.publish()
    await following.catch_up()
    assert engine.bits == second.bits_of[4]


async def test_the_protocol_of_engines_holds_for_what_a_publisher_does(place: str) -> None:
    trainer = Trainer(place)
    publisher = trainer.publisher
    with pytest.raises(EngineUnsupported, match="draws no samples"):
        await publisher.generate(Request(id="r", prompt=(1,), max_tokens=1))
    with pytest.raises(EngineError, match="run/9"):
        await publisher.commit("run/9")
    await trainer.steps(1)
    listed = index_of(Objects(place)).newest
    assert await publisher.commit(listed.id) == 1  # an answer that was lost
    await publisher.rollback(listed.id)
    assert (await publisher.health()).version == 1
    await publisher.close()


@pytest.mark.parametrize(("name", "value"), [("run", ""), ("anchor_every", 0), ("anchors", 0)])
def test_settings_that_cannot_work_are_refused(place: str, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        BucketPublisher(place, **{"run": "run", name: value})


async def test_a_manifest_is_json_that_says_what_the_update_is(place: str) -> None:
    await Trainer(place).steps(1)
    objects = Objects(place)
    manifest = json.loads(objects.get(index_of(objects).newest.manifest))
    assert manifest["run"] == "run"
    assert manifest["update"]["base_version"] is None
    tensors = [each for bucket in manifest["buckets"] for each in bucket["tensors"]]
    assert [each["name"] for each in tensors] == list(SHAPES)
    assert all(len(each["checksum"]) == 16 for each in tensors)
    assert manifest["codec"] == "WDL1"


async def test_a_list_of_no_use_is_refused(place: str) -> None:
    objects = Objects(place)

    def entry(version: int, base: int | None) -> dict:
        fields = {"id": "a", "version": version, "base_version": base}
        return {**fields, "manifest": "manifests/" + "0" * 64, "nbytes": 1}

    for content, said in (
        ("{", "JSONDecodeError"),
        ('{"format": 2}', "format 2"),
        ([], "no updates"),
        ([{}], "lacks 'id'"),
        (1, "1 as 'updates'"),
        ("[]", "not an object"),
        ([entry(3, 2)], "version 3, which builds on 2, after None"),
        ([entry(3, None), entry(3, None)], "version 3, which builds on None, after 3"),
        ([{**entry(3, None), "manifest": 5}], "5 as 'manifest'"),
        ("[" * 100_000, "RecursionError"),
    ):
        text = content
        if not isinstance(content, str):
            text = json.dumps({"format": 1, "run": "run", "updates": content})
        objects.write("latest.json", text.encode())
        with pytest.raises(UpdateDamaged, match=said):
            await follower(place, WeightsEngine()).catch_up()
