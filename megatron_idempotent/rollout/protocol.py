"""The protocol of every engine. `tests/rollout/contract.py` holds them to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from megatron_idempotent.weights import Bucket, WeightUpdate

from .records import EngineHealth, PauseMode, Request, Sample


class RolloutEngine(Protocol):
    """Samples responses, and takes new weights while it serves.

    An update is staged beside the weights in use, then committed while the engine is paused. Every
    method may raise `EngineDead` (no answer any more) or `EngineTimeout`.
    """

    @property
    def name(self) -> str:
        """Unique among the engines of a run; errors and health reports use it."""
        ...

    async def generate(self, request: Request) -> Sample:
        """Sample one response. May be called many times at once; requests wait while paused.

        With a pause in mode "abort" it comes back as a partial, `finish_reason="abort"`, maybe
        without any token. A cancelled call frees what it held.
        Errors: `ValueError` for a request that the model can never answer (a token outside its
            vocabulary, more positions than it has).
        """
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop between two tokens; on return no token is drawn. Paused already: no-op."""
        ...

    async def resume(self) -> None:
        """Go on. Not paused: no-op. Errors: `EngineError` for an engine that is DIRTY."""
        ...

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """Take the update's weights beside those in use, and check them; the engine keeps serving.

        A second update takes the place of one that was staged and not committed. The same update
        again, once it is committed, is a no-op (the buckets are not read).
        Errors: `UpdateRefused` for a version not above the engine's own, a base that is not what it
            serves, or another update being staged at this moment; `UpdateMismatch` and
            `UpdateDamaged` for tensors that do not fit or did not arrive as they were sent. After
            any of them nothing is staged, and what is served has not changed.
        """
        ...

    async def commit(self, update_id: str) -> int:
        """Serve the staged update from now on; returns its version. The engine must be paused.

        Tokens of running requests that were drawn before keep their version; what is drawn after
        it attends to a recomputed cache. Idempotent: the id of the last commit again does
        nothing and returns its version.
        Errors: `EngineError` for an id that is not staged, or while it is not paused. Where it
            fails half-way the engine is DIRTY, and may be committed again.
        """
        ...

    async def rollback(self, update_id: str) -> None:
        """Forget an update that is staged, or half committed, and be at the weights before it.

        Unknown ids, and those of updates that are committed in full: no-op. An engine that cannot
        restore its weights stays DIRTY.
        """
        ...

    async def health(self) -> EngineHealth:
        """Returns the version and the status. Never raises: no answer in time is DEAD."""
        ...

    async def close(self) -> None:
        """Release what it holds; running requests come back as partials. Twice: no-op."""
        ...


class ColocatedEngine(RolloutEngine, Protocol):
    """An engine that shares the trainer's device, and gives its memory back between rollouts."""

    async def sleep(self) -> None:
        """Free weights and cache. Asleep: no-op. Running requests come back as partials."""
        ...

    async def wake(self, tags: Sequence[str]) -> None:
        """Take memory again, of "weights" or of "kv_cache"; weights first, then load them.

        Until both are awake `resume` is refused; until weights are loaded no version is known.
        """
        ...
