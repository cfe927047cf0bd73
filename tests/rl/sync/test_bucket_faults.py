"""Writers that die and buckets that lie: engines serve the trainer's bits, or raise by name."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("zstandard")

from bucket_case import Trainer, WeightsEngine, bits, follower, index_of, unneeded

from megatron_idempotent.rl.sync import BucketFollower, SyncFailed
from megatron_idempotent.rl.weights import UpdateDamaged, UpdateRefused, WeightsError
from megatron_idempotent.rl.weights.transports import TransportError
from megatron_idempotent.rl.weights.transports.bucket import Objects, _held

pytestmark = pytest.mark.full

LATEST = "latest.json"


class Killed(BaseException):
    """Ends the writer where it is: nothing of it runs after that but what has begun."""


def kill_at(trainer: Trainer, write: int, *, after: bool) -> None:
    """Have the trainer's process end before or after it has written so many keys."""
    objects = trainer.publisher._objects
    original, left = objects.write, [write]

    def counted(key: str, content: bytes) -> None:
        left[0] -= 1
        if left[0] < 0 and not after:
            raise Killed
        original(key, content)
        if left[0] < 0:
            raise Killed

    objects.write = counted


#: Three objects, the manifest and the list.
WRITES = 5


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("write", range(WRITES))
async def test_a_writer_that_is_killed_at_an_object_leaves_the_old_update_or_the_new_one(
    place: str, write: int, after: bool
) -> None:
    trainer, engine, following = await Trainer.followed(place, 2)
    trainer.step(0.1)
    kill_at(trainer, write, after=after)
    with pytest.raises(Killed):
        await trainer.publish()
    await following.catch_up()
    published = (write, after) == (WRITES - 1, True)
    assert engine.versions.version == (3 if published else 2)
    assert engine.bits == trainer.bits_of[engine.versions.version]
    trainer.start_again()
    await trainer.steps(1)
    assert unneeded(Objects(place)) == set()
    await following.catch_up()
    assert engine.bits == trainer.bits_of[4]


DIES = """
import asyncio, os, pathlib, signal, sys
sys.path.insert(0, sys.argv[1])
from bucket_case import Trainer
async def main():
    trainer = Trainer(sys.argv[2])
    await trainer.steps(2)
    write = pathlib.Path.write_bytes
    def half(path, content):
        if sys.argv[3] not in str(path):
            return write(path, content)
        write(path, content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    pathlib.Path.write_bytes = half
    await trainer.steps(1)
asyncio.run(main())
"""


@pytest.mark.parametrize("key", [LATEST, pytest.param("objects", marks=pytest.mark.exhaustive)])
async def test_a_process_that_is_killed_within_a_file_is_followed_by_the_next(
    tmp_path: Path, key: str
) -> None:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", DIES, here, str(tmp_path), key]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    (half,) = tmp_path.rglob("*.partial")
    assert half.stat().st_size
    # What a writer that lives is writing stays.
    alive = tmp_path / "latest.json.00000000.partial"
    trainer, engine = Trainer(str(tmp_path)), WeightsEngine()  # with the same weights
    trainer.step()
    trainer.step()
    following = follower(str(tmp_path), engine)
    await following.catch_up()
    assert (engine.versions.version, engine.bits) == (2, bits(trainer.tensors))
    trainer.version = 3
    with _held(alive):
        await trainer.steps(1)
        assert list(tmp_path.rglob("*.partial")) == [alive]
    assert unneeded(Objects(str(tmp_path))) == set()
    await following.catch_up()
    assert (engine.versions.version, engine.bits) == (4, bits(trainer.tensors))


async def test_a_trainer_publishes_on_where_a_listed_manifest_is_gone(place: str) -> None:
    trainer, objects, engine = Trainer(place), Objects(place), WeightsEngine()
    await trainer.steps(2)
    objects.remove([index_of(objects).updates[0].manifest])
    trainer.start_again()
    await trainer.steps(1)
    await follower(place, engine).catch_up()
    assert engine.bits == trainer.bits_of[3]


Lie = Callable[[BucketFollower, list[bytes], random.Random], None]


def _changed(
    following: BucketFollower, folder: str, change: Callable[[str, bytes], bytes | None]
) -> None:
    """Have the store give back something else for one key of a folder."""
    read, chosen = following._objects.read, []

    def lied(key: str, nbytes: int | None = None) -> bytes | None:
        content = read(key, nbytes)
        if key.startswith(folder) and (not chosen or key in chosen):
            chosen.append(key)
            assert content is not None
            return change(key, content)
        return content

    following._objects.read = lied


def stale(following: BucketFollower, lists: list[bytes], chance: random.Random) -> None:
    _changed(following, LATEST, lambda key, content: chance.choice(lists))


def missing(following: BucketFollower, lists: list[bytes], chance: random.Random) -> None:
    folder = chance.choice(["objects", "manifests"])
    _changed(following, folder, lambda key, content: None)


def truncated(following: BucketFollower, lists: list[bytes], chance: random.Random) -> None:
    folder = chance.choice(["objects", "manifests", LATEST])
    _changed(following, folder, lambda key, content: content[: chance.randrange(len(content))])


def swapped(following: BucketFollower, lists: list[bytes], chance: random.Random) -> None:
    folder = chance.choice(["objects", "manifests"])
    others = sorted(following._objects.keys("objects") | following._objects.keys("manifests"))
    other = Objects(following._objects.address)

    def another(key: str, content: bytes) -> bytes | None:
        return other.read(chance.choice([each for each in others if each != key]))

    _changed(following, folder, another)


def flipped(following: BucketFollower, lists: list[bytes], chance: random.Random) -> None:
    def flip(key: str, content: bytes) -> bytes:
        place = chance.randrange(len(content))
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    _changed(following, chance.choice(["objects", "manifests"]), flip)


def renamed(following: BucketFollower, lists: list[bytes], chance: random.Random) -> None:
    _changed(following, LATEST, lambda key, content: content.replace(b'"run"', b'"walk"'))


def silent(following: BucketFollower, lists: list[bytes], chance: random.Random) -> None:
    def fails(key: str, nbytes: int | None = None) -> bytes:
        raise TransportError("the store does not answer")

    following._objects.read = fails


LIES: list[Lie] = [stale, missing, truncated, swapped, flipped, renamed, silent]


@pytest.mark.parametrize(
    ("lie", "error", "said"),
    [
        (missing, UpdateDamaged, "is missing"),
        (truncated, UpdateDamaged, "SHA-256|latest.json"),
        (swapped, UpdateDamaged, "SHA-256"),
        (flipped, UpdateDamaged, "SHA-256"),
        (renamed, (UpdateDamaged, UpdateRefused), "latest.json|'walk'"),
        (silent, TransportError, "does not answer"),
    ],
)
@pytest.mark.parametrize("seed", range(4))
async def test_a_bucket_that_lies_is_an_error_by_name_and_the_engine_serves_on(
    place: str, lie: Lie, error: type[Exception], said: str, seed: int
) -> None:
    trainer, engine, following = await Trainer.followed(place, 2)
    await trainer.steps(1)
    lie(following, [], random.Random(seed))
    with pytest.raises(error, match=said):
        await following.catch_up()
    assert (await engine.health()).status == "SERVING"
    assert engine.bits == trainer.bits_of[2]
    del following._objects.read
    await following.catch_up()
    assert engine.bits == trainer.bits_of[3]


async def test_a_list_that_goes_back_or_leads_to_another_runs_manifest_is_refused(
    place: str,
) -> None:
    elsewhere = f"{place}-elsewhere"
    trainer, engine, other = Trainer(place), WeightsEngine(), Trainer(elsewhere, run="other")
    objects = Objects(place)
    await trainer.steps(1)
    old = objects.read(LATEST)
    await trainer.steps(1)
    following = follower(place, engine)
    await following.catch_up()
    objects.write(LATEST, old)
    with pytest.raises(UpdateRefused, match="version 1, and had 2"):
        await following.catch_up()
    # A list of ours with a manifest of theirs, which is what its name says.
    await other.steps(3)
    theirs = index_of(Objects(elsewhere)).newest
    trainer.start_again()
    await trainer.steps(1)
    objects.write(theirs.manifest, Objects(elsewhere).get(theirs.manifest))
    mine = index_of(objects).newest.manifest.encode()
    content = objects.read(LATEST).replace(mine, theirs.manifest.encode())
    objects.write(LATEST, content)
    with pytest.raises(UpdateDamaged, match="'other'"):
        await following.catch_up()
    assert engine.bits == trainer.bits_of[2]


@pytest.mark.parametrize(
    "updates", [30, pytest.param(1000, marks=pytest.mark.exhaustive)], ids=["30", "1000"]
)
async def test_bits_are_the_trainers_after_each_commit_whatever_fails(
    place: str, updates: int
) -> None:
    chance = random.Random(updates)
    objects = Objects(place)
    lists: list[bytes] = []
    trainer = Trainer(place, anchor_every=7, anchors=2)
    engines = [WeightsEngine(str(number)) for number in range(3)]
    followers = [follower(place, engine) for engine in engines]
    told = dict.fromkeys(("killed", "aborted", "lied", "restarted", "caught up", "chains"), 0)

    async def publish() -> None:
        trainer.step(chance.choice([0.0, 0.01, 0.01, 0.05, 0.6]))
        fault = chance.random()
        if fault < 0.1:
            kill_at(trainer, chance.randrange(WRITES), after=chance.random() < 0.5)
        elif fault < 0.2:
            trainer.fails_at = chance.randrange(3)
        elif fault < 0.25:
            trainer.publisher.ask_for_anchor()
        try:
            await trainer.publish(deltas=chance.random() < 0.95)
        except Killed:
            told["killed"] += 1
            trainer.start_again()
        except (OSError, SyncFailed):
            told["aborted"] += 1
        content = objects.read(LATEST)
        if content is not None:
            lists.append(content)
            del lists[:-5]

    for _ in range(updates):
        await publish()
        for number in range(3):
            if chance.random() < 0.05:
                engines[number] = WeightsEngine(str(number))
                followers[number] = follower(place, engines[number])
                told["restarted"] += 1
            if chance.random() < 0.5:
                continue  # it loses this one
            engine, following = engines[number], followers[number]
            lied = bool(lists) and chance.random() < 0.3
            if lied:
                chance.choice(LIES)(following, lists, chance)
            try:
                found = await following.catch_up()
                told["caught up"] += 1
                told["chains"] += found is not None and found.updates > 1
            except (WeightsError, TransportError):
                assert lied
                told["lied"] += 1
            if lied:
                vars(following._objects).pop("read", None)
            health = await engine.health()
            assert health.status == "SERVING"
            if health.version:
                assert engine.bits == trainer.bits_of[health.version], told
            elif not lied:
                assert not lists
            if not lied and lists:
                assert health.version == index_of(objects).newest.version
    trainer.fails_at = None
    await trainer.publish(deltas=False)
    await trainer.steps(1)
    for engine, following in zip(engines, followers, strict=True):
        await following.catch_up()
        assert engine.bits == bits(trainer.tensors)
    left = unneeded(objects)  # by the last update, if it was an anchor
    await trainer.steps(1)
    assert not left & unneeded(objects)
    assert all(told.values()), told
