"""The contract of every data plane: a class of tests to inherit.

    class TestMyPlane(PlaneContract):
        @pytest.fixture
        def make_plane(self):
            return MyPlane

`make_plane()` makes an empty plane of its own each time; it is called in a running event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import math
import random
import struct

import pytest

from megatron_idempotent.rl.controller.protocol import RolloutGroup
from megatron_idempotent.rl.engines.protocol import RoutedExperts, Sample


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt of a task's own type."""

    text: str
    tokens: tuple[int, ...]


def group(number, *, seed=0, samples=3, tokens=5, **fields):
    """A group of random samples, the first of which has no token."""
    draw = random.Random(f"{number}/{seed}")
    made = tuple(
        Sample(
            request_id=f"{number}/{place}/ü",
            tokens=tuple(draw.randrange(1 << 17) for _ in range(length)),
            logprobs=tuple(-draw.expovariate(0.3) for _ in range(length)),
            versions=tuple(sorted(draw.randrange(9) for _ in range(length))),
            finish_reason=draw.choice(["stop", "length", "abort"]),
            routed_experts=RoutedExperts(data=draw.randbytes(6 * length), layers=3, topk=2)
            if length
            else None,
        )
        for place, length in enumerate(place * tokens for place in range(samples))
    )
    rewards = tuple(draw.random() for _ in made)
    prompt = Question(text=f"{number} ≤ ?", tokens=(7, number))
    return RolloutGroup(id=number, prompt=prompt, samples=made, rewards=rewards, **fields)


def bits(values):
    """Floats as they are in memory: -0.0 is not 0.0, and a NaN is itself."""
    return [struct.pack("<d", value) for value in values]


def check_same(found, expected):
    """Equal, with floats to the last bit, and of the same types."""
    assert repr(found) == repr(expected)
    assert bits(found.rewards) == bits(expected.rewards)
    for one, other in zip(found.samples, expected.samples, strict=True):
        assert bits(one.logprobs) == bits(other.logprobs)
        assert one.routed_experts == other.routed_experts
        assert {type(each) for each in (*one.tokens, *one.versions)} <= {int}
        assert {type(each) for each in one.logprobs} <= {float}


def on_plane(test):
    """Run a test on a plane of its own: it is given as `plane`, beside the fixtures."""

    @functools.wraps(test)
    def run(self, **given):
        self.run(given["make_plane"], lambda plane: test(self, plane=plane, **given))

    signature = inspect.signature(test)
    fixtures = [each for each in signature.parameters.values() if each.name != "plane"]
    run.__signature__ = signature.replace(parameters=fixtures)
    return run


class PlaneContract:
    """Groups in, the same groups out, until they are cleared."""

    deadline_s = 60.0

    @pytest.fixture
    def make_plane(self):
        """Make an empty plane."""
        raise NotImplementedError

    def run(self, make_plane, scenario):
        """Run a scenario on a plane, within the deadline, and close it twice."""

        async def whole():
            plane = make_plane()
            try:
                await scenario(plane)
            finally:
                await plane.close()
                await plane.close()

        asyncio.run(asyncio.wait_for(whole(), self.deadline_s))

    @on_plane
    async def test_groups_come_back_as_they_were_put_bit_by_bit(self, plane, make_plane):
        values = (-0.0, 0.1 + 0.2, 5e-324, -math.pi, -math.inf, math.nan, math.nextafter(-1, 0))
        extreme = Sample(
            request_id="",
            tokens=(0, 2**31, 2**53 + 1, 1, 2, 3, 4),
            logprobs=values,
            versions=(0, 0, 1, 2**40, 2**40, 2**40, 2**40),
            finish_reason="length",
        )
        samples = (extreme,) * len(values)
        groups = [
            RolloutGroup(id=2**40, prompt=None, samples=samples, rewards=values),
            *(group(0), group(3, samples=1), group(1, samples=6, tokens=11, failed=2)),
        ]
        for number, prompt in enumerate(["text", (1, 2), {"text": "a", "tokens": [3]}, 7], 4):
            groups.append(dataclasses.replace(group(number), prompt=prompt))
        for each in groups:
            await plane.put(each)
        for each in reversed(groups):
            check_same(await plane.get(each.id), each)

    @on_plane
    async def test_a_group_that_is_not_there_is_a_key_error_with_its_id(self, plane, make_plane):
        with pytest.raises(KeyError, match="17"):
            await plane.get(17)
        await plane.clear([])
        await plane.clear([17])
        await plane.put(group(1))
        with pytest.raises(KeyError, match="17"):
            await plane.get(17)

    @pytest.mark.parametrize("seed", range(2))
    @on_plane
    async def test_any_calls_again_and_again_do_what_they_do_to_a_dictionary(
        self, plane, make_plane, seed
    ):
        """Groups are put again with other samples, read twice, cleared twice, and put after it."""
        draw, kept = random.Random(seed), {}
        for number in range(40):
            group_id = draw.randrange(5)
            if draw.random() < 0.6:
                sizes = {"samples": draw.randrange(1, 6), "tokens": draw.randrange(1, 12)}
                kept[group_id] = group(group_id, seed=draw.randrange(number + 1), **sizes)
                for _ in range(draw.randrange(1, 3)):
                    await plane.put(kept[group_id])
            else:
                cleared = [draw.randrange(7) for _ in range(draw.randrange(4))]
                for _ in range(draw.randrange(1, 3)):
                    await plane.clear(cleared)
                kept = {each: found for each, found in kept.items() if each not in cleared}
            for each in range(5):
                if each in kept:
                    assert await plane.get(each) == kept[each]
                else:
                    with pytest.raises(KeyError, match=str(each)):
                        await plane.get(each)

    @on_plane
    async def test_many_are_put_read_and_cleared_at_once(self, plane, make_plane):
        numbers = range(24)
        await asyncio.gather(*(plane.put(group(each)) for each in numbers))
        found = await asyncio.gather(*(plane.get(each) for each in numbers))
        assert found == [group(each) for each in numbers]
        await asyncio.gather(*(plane.clear([each, each + 1]) for each in range(0, 24, 2)))
        found = await asyncio.gather(*(plane.get(each) for each in numbers), return_exceptions=True)
        assert {type(each) for each in found} == {KeyError}

    @on_plane
    async def test_planes_are_apart(self, plane, make_plane):
        other = make_plane()
        await plane.put(group(1))
        with pytest.raises(KeyError):
            await other.get(1)
        await other.put(group(1, seed=2))
        await other.clear([1])
        assert await plane.get(1) == group(1)
        await other.close()
        assert await plane.get(1) == group(1)
