"""Forty updates under load lose no token, repeat none, and mix no weights."""

import asyncio
import collections
import dataclasses
import itertools

import pytest
from contract_base import cut, listed
from local_cases import contract, request
from tiny import read_weights

from megatron_idempotent.rl.engines.pool import generate_whole
from megatron_idempotent.rl.weights import WeightUpdate

pytestmark = pytest.mark.full

UPDATES = 40


def asked_by(worker, turn):
    """Make a worker's request; it has its neighbour's prompt, so some share their computation."""
    return request(
        1000 * worker + turn,
        prompt=tuple(range(3 + worker // 2, 9 + worker // 2 + turn % 5)),
        max_tokens=1 + (7 * worker + 5 * turn) % 40,
        stop_tokens=(60,),
    )


async def test_forty_updates_lose_no_token_and_repeat_none(old, new, make_engine):
    directories = [old, new]
    sent = [cut(read_weights(directory)) for directory in directories]
    modes = itertools.cycle(["keep", "abort", "keep", "wait"])
    engine = make_engine(max_running=17)
    done = []
    ended = asyncio.Event()

    async def work(worker):
        for turn in itertools.count():
            if ended.is_set():
                return
            asked = asked_by(worker, turn)
            done.append((asked, await generate_whole(engine, asked)))

    workers = [asyncio.ensure_future(work(worker)) for worker in range(16)]
    for version in range(1, UPDATES + 1):
        update = WeightUpdate(id=f"u{version}", version=version)
        await engine.stage(update, listed(sent[version % 2]))
        await engine.pause(next(modes))
        assert await engine.commit(update.id) == version
        await engine.resume()
        # A version that nobody draws with would show nothing.
        asked = dataclasses.replace(asked_by(99, version), max_tokens=2)
        sample = await engine.generate(asked)
        assert set(sample.versions) == {version}
        done.append((asked, sample))
        if version % 10 == 0:
            # The same again, and one that came too late to be taken back.
            assert await engine.commit(update.id) == version
            await engine.rollback(update.id)
    ended.set()
    await asyncio.gather(*workers)
    health = await engine.health()
    assert (health.status, health.version, health.running) == ("SERVING", UPDATES, 0)

    drawn = collections.Counter()
    for asked, sample in done:
        drawn.update(sample.versions)
        assert sample.request_id == asked.id
        assert list(sample.versions) == sorted(sample.versions)
        stopped = sample.tokens[-1] == 60
        assert (sample.finish_reason == "stop") == stopped
        assert stopped or len(sample.tokens) == asked.max_tokens
        assert 60 not in sample.tokens[:-1]
    assert set(range(1, UPDATES + 1)) <= set(drawn)
    # A lost or repeated token would be conditioned on by those after it.
    crossing = [each for each in done if len(set(each[1].versions)) > 1]
    assert len(crossing) > 40
    for asked, sample in crossing[:: len(crossing) // 40]:
        weights = {version: directories[version % 2] for version in sample.versions}
        contract.check_logprobs(asked, sample, weights)
