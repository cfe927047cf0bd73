"""Shared by the tests of the engine in this process."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from contract_base import ContractBase

from megatron_idempotent.rl.engines import Request
from megatron_idempotent.rl.engines.transformers_batch import RowCache, cache_argument

contract = ContractBase()


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


class Watched:
    """Loads a checkpoint and looks at every forward.

    Example: `watched = Watched(directory); engine = TransformersEngine(watched.model)`.
    """

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory)
        self.prefills: list[tuple[int, int]] = []
        """Sequences and positions of each forward for rows that join."""
        self.draws: list[int] = []
        """Rows of each forward that draws."""
        self.failing: Exception | None = None
        """Raised by the next forward, once."""
        self.failing_prefill: Exception | None = None
        """Raised by the next forward for rows that join, once."""
        self._go = threading.Event()
        self._go.set()
        self._held = threading.Event()
        self.model.base_model.register_forward_pre_hook(self._look, with_kwargs=True)

    def hold(self) -> None:
        """Forward stop at their begin, from now on until `release()`."""
        self._held.clear()
        self._go.clear()

    def release(self) -> None:
        """Forward go on."""
        self._go.set()

    async def held(self) -> None:
        """Wait until a forward is stopped."""
        assert await asyncio.to_thread(self._held.wait, 30)

    def _look(self, module, arguments, keywords):
        shape = tuple(keywords["input_ids"].shape)
        if isinstance(keywords[cache_argument(module)], RowCache):
            self.draws.append(shape[0])
        else:
            self.prefills.append(shape)
            if self.failing_prefill is not None:
                self.failing, self.failing_prefill = self.failing_prefill, None
        self._held.set()
        assert self._go.wait(30)
        if self.failing is not None:
            error, self.failing = self.failing, None
            raise error
