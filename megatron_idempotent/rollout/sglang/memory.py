"""The memory that a server gives back between rollouts, and takes again."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_idempotent.rollout.errors import EngineError, EngineUnsupported

from .api import Api
from .facts import Facts

TAGS = ("weights", "kv_cache")


class Memory:
    """Tracks which parts of a server's memory are freed.

    SGLang's scheduler dies of a part that is taken twice, so nothing is asked for that is there.
    """

    def __init__(self, api: Api, *, timeout_s: float) -> None:
        self._api = api
        self._timeout_s = timeout_s
        self._freed: list[str] = []

    @property
    def asleep(self) -> str:
        """Describes the freed parts; empty if there are none."""
        return f"it sleeps, without {' and '.join(self._freed)}" if self._freed else ""

    @property
    def awake(self) -> bool:
        """True if any part is there."""
        return len(self._freed) < len(TAGS)

    def check_sleeps(self, facts: Facts, name: str) -> None:
        """Errors: `EngineUnsupported` for a server that would free nothing and not say so."""
        if not facts.memory_saver:
            raise EngineUnsupported(
                f"engine {name} was started without --enable-memory-saver, so it cannot sleep"
            )

    def check_weights(self, name: str) -> None:
        """Errors: `EngineError` where there is no memory that weights could be loaded into."""
        if "weights" in self._freed:
            raise EngineError(f'engine {name} sleeps; wake(["weights"]) before a commit')

    async def free(self) -> None:
        """Free those that are there. The server must be idle."""
        tags = [tag for tag in TAGS if tag not in self._freed]
        await self._change("/release_memory_occupation", tags)
        self._freed += tags

    async def take(self, tags: Sequence[str]) -> None:
        """Have some again; those that are there: no-op. Errors: `ValueError` for other tags."""
        if unknown := [tag for tag in tags if tag not in TAGS]:
            raise ValueError(f"wake() got {unknown}: some of {list(TAGS)}")
        freed = [tag for tag in TAGS if tag in tags and tag in self._freed]
        if freed:
            await self._change("/resume_memory_occupation", freed)
            self._freed = [tag for tag in self._freed if tag not in freed]

    async def _change(self, path: str, tags: list[str]) -> None:
        await self._api.done("POST", path, {"tags": tags}, timeout_s=self._timeout_s)
