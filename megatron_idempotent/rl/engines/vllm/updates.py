"""Stages, commits and takes back updates on one vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

from megatron_idempotent.rl.engines.protocol import EngineError, EngineTimeout, EngineUnsupported
from megatron_idempotent.rl.weights import (
    Bucket,
    UpdateDamaged,
    UpdateMismatch,
    UpdateRefused,
    WeightsError,
    WeightUpdate,
)
from megatron_idempotent.rl.weights.transports import TransportError, TransportTimeout
from megatron_idempotent.rl.weights.transports.base import Sender

from .control import Control, Timeouts

_KINDS: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (
        EngineUnsupported,
        TransportError,
        TransportTimeout,
        UpdateDamaged,
        UpdateMismatch,
        UpdateRefused,
        WeightsError,
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkersState:
    """Describes an engine's workers. Example: `WorkersState.of(answers, engine="a").version`."""

    version: int | None
    """The version of the last commit; None if there was none, or if workers differ."""
    committed: str
    """The id of the last commit; empty if there was none, or if workers differ."""
    holds: Mapping[str, int]
    """The versions of the updates that all workers can load, by id: staged, or committed."""
    staging: str
    """The id of an update that some worker is still receiving; empty if there is none."""
    received: int
    """The number of buckets of a staged update that all workers have."""
    dirty: str
    """The reason why weights may be of more than one version; empty if they are of one."""
    half: str
    """The id of the update whose commit failed half-way; empty if that is not known."""
    disagree: bool
    """True if workers have committed different versions."""
    updating: bool
    """True if a commit was begun in some worker, and neither ended nor failed."""

    @classmethod
    def of(cls, answers: Sequence[Mapping[str, Any]], *, engine: str) -> WorkersState:
        """Return the state of workers, none of which has failed.

        Errors: the first worker's error, with the engine's name before its message.
        """
        for answer in answers:
            for error in (answer.get("error"), answer.get("failed")):
                if error:
                    raise raised(error, engine=engine)
        return cls._whole(answers)

    @classmethod
    def whatever(cls, answers: Sequence[Mapping[str, Any]], *, engine: str) -> WorkersState:
        """Return the state of workers, also if receiving an update has failed.

        Errors: the first error with which a worker has answered.
        """
        for answer in answers:
            if answer.get("error"):
                raise raised(answer["error"], engine=engine)
        return cls._whole(answers)

    @classmethod
    def _whole(cls, answers: Sequence[Mapping[str, Any]]) -> WorkersState:
        if not answers:
            raise EngineError("no worker answered; is collective_rpc supported by its executor?")
        versions = {answer["version"] for answer in answers}
        committed = {str(answer["committed"]) for answer in answers}
        dirty = next((answer["dirty"] for answer in answers if answer["dirty"]), "")
        if not dirty and len(versions) > 1:
            dirty = f"its workers are at versions {sorted(versions, key=str)}"
        return cls(
            version=versions.pop() if len(versions) == 1 else None,
            committed=committed.pop() if len(committed) == 1 else "",
            holds={
                held: version
                for held, version in answers[0]["holds"].items()
                if all(held in answer["holds"] for answer in answers)
            },
            staging=next((answer["staging"] for answer in answers if answer["staging"]), ""),
            received=min(int(answer["received"]) for answer in answers),
            dirty=dirty,
            half=next((answer["half"] for answer in answers if answer["half"]), ""),
            disagree=len(versions) > 1,
            updating=any(answer["updating"] for answer in answers),
        )


def raised(error: Mapping[str, str], *, engine: str) -> Exception:
    """Return a worker's error: of its own class if that is one of ours, else `EngineError`."""
    kind, message = error["kind"], error["message"]
    if kind in _KINDS:
        return _KINDS[kind](f"engine {engine}: {message}")
    return EngineError(f"engine {engine}: {kind} in a worker: {message}")


UNSTAMPED = "default"
"""The stamp of tokens that vLLM draws before it was told a version."""
_POLL_S = (0.002, 0.05)


class UpdateStager:
    """Stages, commits and takes back updates; their state is kept by the workers alone.

    So a client that is restarted finds it there.

    Example:
        await updates.stage(update, buckets)
        await updates.commit("run-7/12")       # between a pause and a resume
    """

    def __init__(
        self,
        control: Control,
        *,
        engine: str,
        transport: Callable[[], Sender] | None,
        timeouts: Timeouts,
        initial_version: int,
        keep_copy: bool,
    ) -> None:
        self._control = control
        self._engine = engine
        self._transport = transport
        self._timeouts = timeouts
        self._initial_version = initial_version
        self._keep_copy = keep_copy
        self._staging = ""
        # Commits and rollbacks take several calls each, which must not mix.
        self._switching = asyncio.Lock()

    async def state(self) -> WorkersState:
        """Return the workers' state; before any commit, the version is that of vLLM's stamp."""
        found = await self._control.rpc({"do": "state"})
        state = WorkersState.whatever(found, engine=self._engine)
        if state.version is None and not state.dirty:
            serving = self.version_of(await self._control.stamp())
            state = dataclasses.replace(state, version=serving)
        return state

    def version_of(self, stamp: str) -> int:
        """Return the version that vLLM's own stamp stands for.

        Errors: `EngineError` for a stamp of another client.
        """
        if stamp == UNSTAMPED:
            return self._initial_version
        if not stamp.isdecimal():
            raise EngineError(
                f"engine {self._engine} has weights of version {stamp!r}, which is no number: "
                "another client has updated it; restart it"
            )
        return int(stamp)

    async def must_not_serve(self, state: WorkersState) -> str:
        """Return the reason why the engine must not serve; empty if it may."""
        if state.dirty:
            return state.dirty
        stamped = self.version_of(await self._control.stamp())
        if stamped == state.version:
            return ""
        return f"its weights are of version {state.version}, and it stamps tokens with {stamped}"

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """See `RolloutEngine.stage`."""
        if self._transport is None:
            raise ValueError(f"engine {self._engine} has no transport; construct it with one")
        if self._staging:
            raise UpdateRefused(
                f"engine {self._engine}: update {self._staging} is being staged; send "
                f"{update.id} when that one is staged, or rolled back"
            )
        self._staging = update.id
        try:
            state = await self.state()
            if state.committed == update.id and not state.dirty:
                return
            await self._send(update, buckets, self._transport(), state.version)
        finally:
            self._staging = ""

    async def commit(self, update_id: str) -> int:
        """See `RolloutEngine.commit`."""
        async with self._switching:
            state = await self.state()
            if state.committed == update_id and not state.dirty and state.version is not None:
                await self._stamp(state.version)  # where an earlier answer was lost
                return state.version
            if not await self._control.is_paused():
                raise EngineError(
                    f"engine {self._engine} is serving; pause it before commit({update_id!r})"
                )
            if update_id not in state.holds:
                raise EngineError(
                    f"engine {self._engine} has no update {update_id} staged (it has "
                    f"{', '.join(state.holds) or 'none'}); stage it first"
                )
            version = state.holds[update_id]
            await self._load({"update_id": update_id}, state, str(version))
            return version

    async def rollback(self, update_id: str) -> None:
        """See `RolloutEngine.rollback`."""
        async with self._switching:
            state = await self.state()
            if state.dirty and state.half in (update_id, ""):
                if state.disagree:
                    raise EngineError(
                        f"engine {self._engine}: {state.dirty}, so there is no one version to go "
                        "back to; commit again, or stage another update"
                    )
                stamp = await self._control.stamp()
                await self._load({"restore": True}, state, stamp)
            elif not state.dirty and state.committed == update_id and state.version is not None:
                await self._stamp(state.version)
            await self._tell({"do": "drop", "id": update_id})

    async def _send(
        self,
        update: WeightUpdate,
        buckets: AsyncIterator[Bucket],
        sender: Sender,
        serving: int | None,
    ) -> None:
        try:
            opened = await sender.open(update)
            await self._tell(
                {
                    "do": "open",
                    # What is None is left out: workers may be of an older release.
                    "update": {
                        k: v for k, v in dataclasses.asdict(update).items() if v is not None
                    },
                    "opened": dict(opened),
                    "serving": serving if serving is not None else self._initial_version,
                    "keep": self._keep_copy,
                    "silence_s": self._timeouts.silence_s,
                }
            )
            sent = 0
            async for bucket in buckets:
                announced = await sender.announce(bucket)
                await self._tell({"do": "bucket", "id": update.id, "announced": dict(announced)})
                sent += 1
                await _both(sender.transmit(bucket), self._received(update.id, sent))
                await sender.release(bucket)
            await self._tell({"do": "complete", "id": update.id, "buckets": sent})
        except BaseException:
            # What failed is what is raised; an engine that cannot be told drops it by itself.
            with contextlib.suppress(EngineError):
                await self._tell({"do": "drop", "id": update.id})
            raise
        finally:
            await sender.close()

    async def _received(self, update_id: str, buckets: int) -> None:
        """Wait until all workers have that many buckets. Errors: theirs; `EngineTimeout`."""
        deadline = time.monotonic() + self._timeouts.bucket_s
        pause_s = _POLL_S[0]
        while True:
            state = WorkersState.of(await self._control.rpc({"do": "state"}), engine=self._engine)
            if state.received >= buckets:
                return
            if update_id != state.staging:
                raise UpdateRefused(
                    f"engine {self._engine}: update {update_id} was rolled back while it was staged"
                )
            if time.monotonic() > deadline:
                raise EngineTimeout(
                    f"engine {self._engine} has {state.received} of {buckets} buckets of update "
                    f"{update_id} after {self._timeouts.bucket_s:g} s; bucket_s is the limit"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _POLL_S[1])

    async def _load(self, info: Mapping[str, Any], state: WorkersState, stamp: str) -> None:
        """Exchange the weights. Running requests compute their caches again after it."""
        if state.updating:
            await self._tell({"do": "settle"})
        await self._control.load(info, stamp)

    async def _stamp(self, version: int) -> None:
        if self.version_of(await self._control.stamp()) != version:
            await self._control.set_stamp(str(version))

    async def _tell(self, command: Mapping[str, Any]) -> None:
        """Send a command to all workers. Errors: theirs."""
        WorkersState.whatever(await self._control.rpc(command), engine=self._engine)


async def _both(*calls: Coroutine[Any, Any, None]) -> None:
    """Run two calls at once; if one fails, cancel the other, whose peer is gone."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
