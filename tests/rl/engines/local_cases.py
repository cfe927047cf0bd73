"""Shared by the tests of the engine in this process."""

import asyncio

from contract_base import ContractBase
from tiny import read_weights

from megatron_idempotent.rl.engines import Request
from megatron_idempotent.rl.weights import Bucket, TensorInfo

contract = ContractBase()


class Source:
    """The weights of a checkpoint."""

    def __init__(self, directory):
        self.weights = read_weights(directory)

    def tensors(self):
        return tuple(TensorInfo.of(name, tensor) for name, tensor in self.weights.items())

    def buckets(self, *, bucket_bytes):
        yield Bucket.of(0, self.weights)


def request(seed=0, *, prompt=(5, 6, 7), **settings):
    """A request of 8 tokens, unless it is said otherwise."""
    return Request(id=f"{prompt}/{seed}", prompt=prompt, seed=seed, **{"max_tokens": 8, **settings})


def start(engine, *requests):
    """Their calls, which begin when the test waits for something."""
    return [asyncio.ensure_future(engine.generate(each)) for each in requests]


async def begun(engine, *requests, tokens=3):
    """Their calls, of which each has drawn so many tokens."""
    calls = start(engine, *requests)
    await engine.generate(request(prompt=(8,), max_tokens=tokens))
    return calls


async def held(watched, engine, *requests):
    """Their calls, whose first forward is stopped at its begin."""
    watched.hold()
    calls = start(engine, *requests)
    await watched.held()
    return calls


async def works(engine, weights, version):
    """It serves those weights, and nothing of what failed is left."""
    assert (await engine.health()).running == 0
    await contract.serves(engine, weights, version)
