"""Shared by the tests of the engine in this process."""

from __future__ import annotations

import asyncio

from contract_base import ContractBase

from megatron_idempotent.rl.engines import Request

contract = ContractBase()


def request(seed=0, *, prompt=(5, 6, 7), **settings):
    """A request of 8 tokens, unless it is said otherwise."""
    return Request(id=f"{prompt}/{seed}", prompt=prompt, seed=seed, **{"max_tokens": 8, **settings})


def run(scenario):
    """Run it, and not for ever."""
    asyncio.run(asyncio.wait_for(scenario(), 60))


async def works(engine, weights, version):
    """It serves those weights, and nothing of what failed is left."""
    health = await engine.health()
    assert (health.status, health.version, health.running) == ("SERVING", version, 0)
    asked = request(9, max_tokens=12)
    sample = await engine.generate(asked)
    assert set(sample.versions) == {version}
    contract.check_logprobs(asked, sample, weights)
