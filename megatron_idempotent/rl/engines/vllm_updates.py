"""Stages, commits and rolls back weight updates on one vLLM server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

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

from .protocol import EngineError, EngineTimeout, EngineUnsupported, both_ends
from .vllm_server import Control

_KINDS: dict[str, type[Exception]] = {
    error_type.__name__: error_type
    for error_type in (
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
    """The combined state of a vLLM server's workers, from their responses to a command.
    Example: `WorkersState.of(answers, engine="a")`.
    """

    version: int | None
    """The version of the last commit; None if there was none or workers differ."""
    committed: str
    """The id of the last commit; empty if there was none or workers differ."""
    holds: Mapping[str, int]
    """The updates that every worker has staged or committed: id to version."""
    staging: str
    """The id of an update that a worker is still receiving; empty if there is none."""
    received: int
    """The number of buckets that every worker has received."""
    dirty: str
    """The reason why the weights may mix several versions; empty if they do not."""
    half: str
    """The id of the update whose commit failed midway; empty if unknown."""
    disagree: bool
    """True if workers have committed different versions."""
    decode_s: float = 0.0
    """Seconds that the slowest worker spent to decode the last update's deltas."""

    @classmethod
    def of(
        cls, answers: Sequence[Mapping[str, Any]], *, engine: str, receiving: bool = False
    ) -> WorkersState:
        """Combine the responses of all workers to one command into one state, or raise the first
        error that a worker reports.

        Args:
            answers: the response of each worker.
            engine: the engine's name, for errors.
            receiving: True to raise also the error that ended a worker's receiving.

        Raises:
            Exception: the first worker's error, its message prefixed with the engine's name.
        """
        for answer in answers:
            error = answer.get("error") or (receiving and answer.get("failed"))
            if error:
                kind, message = error["kind"], error["message"]
                if kind in _KINDS:
                    raise _KINDS[kind](f"engine {engine}: {message}")
                raise EngineError(f"engine {engine}: {kind} in a worker: {message}")
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
                update_id: version
                for update_id, version in answers[0]["holds"].items()
                if all(update_id in answer["holds"] for answer in answers)
            },
            staging=next((answer["staging"] for answer in answers if answer["staging"]), ""),
            received=min(int(answer["received"]) for answer in answers),
            dirty=dirty,
            half=next((answer["half"] for answer in answers if answer["half"]), ""),
            disagree=len(versions) > 1,
            decode_s=max(float(answer.get("decode_s", 0.0)) for answer in answers),
        )


UNSTAMPED = "default"
"""The stamp of vLLM's tokens before a client has set a version."""
_POLL_S = (0.002, 0.05)


class VllmUpdates:
    """The base class of `VllmEngine` with the methods that change weights: it stages, commits and
    rolls back updates on a vLLM server.

    Only the workers keep state, so a restarted client continues from the workers' state.
    """

    def __init__(
        self,
        control: Control,
        *,
        transport: Callable[[], Sender] | None,
        keep_copy: bool,
        adapter: str | None,
    ) -> None:
        self._control, self.name = control, control.engine
        self._adapter = adapter
        self._transport = transport
        self._keep_copy = keep_copy
        # Commits and rollbacks take several calls each, which must not interleave.
        self._switching = asyncio.Lock()

    async def _state(self) -> WorkersState:
        """Ask all workers for their state, and return the combined state. Before the first commit,
        when workers know no version, its version is the one with which vLLM stamps tokens.
        """
        state = await self._tell({"do": "state"})
        if state.version is None and not state.dirty:
            serving = self._version_of(await self._control.stamp())
            state = dataclasses.replace(state, version=serving)
        return state

    def _version_of(self, stamp: str) -> int:
        """Convert the text with which vLLM stamps tokens to a weight version; vLLM's default text
        means version 0, that of the weights that the server was started with.

        Raises:
            EngineError: another client set the stamp.
        """
        if stamp == UNSTAMPED:
            return 0
        if not stamp.isdecimal():
            raise EngineError(
                f"engine {self.name} has weights of version {stamp!r}, which is no number: "
                "another client has updated it; restart it"
            )
        return int(stamp)

    async def _wrong(self, state: WorkersState) -> str:
        """Return the reason why the engine must not serve: mixed weights, or a wrong version stamp
        on tokens. Empty if it may serve.
        """
        if state.dirty:
            return state.dirty
        stamped = self._version_of(await self._control.stamp())
        if stamped == state.version:
            return ""
        return f"its weights are of version {state.version}, and it stamps tokens with {stamped}"

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """Send an update's buckets to all workers, which check and stage them; see
        `RolloutEngine.stage`.

        Each worker stages all tensors in host memory.
        """
        if self._transport is None:
            raise ValueError(f"engine {self.name} has no transport; construct it with one")
        state = await self._state()
        if state.committed == update.id and not state.dirty:
            return
        sender = self._transport()
        try:
            opened = await sender.open(update)
            await self._tell(
                {
                    "do": "open",
                    "update": dataclasses.asdict(update),
                    "opened": dict(opened),
                    "serving": state.version or 0,
                    "keep": self._keep_copy,
                    "silence_s": self._control.timeouts.silence_s,
                    "adapter": self._adapter and await self._card(),
                }
            )
            sent = 0
            async for bucket in buckets:
                announced = await sender.announce(bucket)
                await self._tell({"do": "bucket", "id": update.id, "announced": dict(announced)})
                sent += 1
                await both_ends(sender.transmit(bucket), self._received(update.id, sent))
                await sender.release(bucket)
            await self._tell({"do": "complete", "id": update.id, "buckets": sent})
        except BaseException:
            # The first error is raised; workers that cannot be reached drop the update by
            # themselves.
            with contextlib.suppress(EngineError):
                await self._tell({"do": "drop", "id": update.id})
            raise
        finally:
            await sender.close()

    async def commit(self, update_id: str) -> int:
        """Make all workers load the staged update into the model; return the update's version. See
        `RolloutEngine.commit`.
        """
        async with self._switching:
            state = await self._state()
            if state.committed == update_id and not state.dirty and state.version is not None:
                await self._stamp(state.version)  # an earlier response was lost
                return state.version
            if not await self._control.is_paused():
                raise EngineError(
                    f"engine {self.name} is serving; pause it before commit({update_id!r})"
                )
            if update_id not in state.holds:
                raise EngineError(
                    f"engine {self.name} has no update {update_id} staged (it has "
                    f"{', '.join(state.holds) or 'none'}); stage it first"
                )
            version = state.holds[update_id]
            await self._load({"update_id": update_id}, str(version))
            return version

    async def rollback(self, update_id: str) -> None:
        """Make all workers drop a staged update, or load the previous weights after a commit that
        failed midway; see `RolloutEngine.rollback`.

        Torn weights are replaced by the workers' copy of the previous version, or by the checkpoint
        that they were started from.

        Raises:
            EngineError: there is no copy and no checkpoint, or loading failed; the engine is DIRTY.
        """
        async with self._switching:
            state = await self._state()
            if state.dirty and state.half in (update_id, ""):
                if state.disagree:
                    raise EngineError(
                        f"engine {self.name}: {state.dirty}, so there is no one version to go "
                        "back to; commit again, or stage another update"
                    )
                stamp = await self._control.stamp()
                await self._load({"restore": True}, stamp)
            elif not state.dirty and state.committed == update_id and state.version is not None:
                await self._stamp(state.version)
            await self._tell({"do": "drop", "id": update_id})

    async def _card(self) -> Mapping[str, str]:
        """Return the server's entry, with name and folder, for the LoRA adapter whose factors
        updates replace. Raise `EngineUnsupported` unless this adapter is the server's only one.
        """
        cards = (await self._control.get("/v1/models"))["data"]
        adapters = {card["id"]: card for card in cards if card.get("parent")}
        if list(adapters) != [self._adapter]:
            raise EngineUnsupported(
                f"engine {self.name} has adapters {list(adapters)}, and {self._adapter!r} is to be "
                "updated; start its server with --enable-lora and --lora-modules "
                f"{self._adapter}=FOLDER, and no other"
            )
        card: Mapping[str, str] = adapters[self._adapter]
        return card

    async def _received(self, update_id: str, buckets: int) -> None:
        """Poll the workers until all of them have received `buckets` buckets of the update. Raise
        an error if receiving fails or takes longer than `bucket_s` seconds.

        Raises:
            EngineTimeout: they have not after `bucket_s` seconds.
            UpdateRefused: the update was rolled back meanwhile.
            Exception: as in `WorkersState.of`.
        """
        limit_s = self._control.timeouts.bucket_s
        deadline = time.monotonic() + limit_s
        pause_s = _POLL_S[0]
        while True:
            state = await self._tell({"do": "state"}, receiving=True)
            if state.received >= buckets:
                return
            if update_id != state.staging:
                raise UpdateRefused(
                    f"engine {self.name}: update {update_id} was rolled back while it was staged"
                )
            if time.monotonic() > deadline:
                raise EngineTimeout(
                    f"engine {self.name} has {state.received} of {buckets} buckets of update "
                    f"{update_id} after {limit_s:g} s; bucket_s is the limit"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _POLL_S[1])

    async def _load(self, info: Mapping[str, Any], stamp: str) -> None:
        """Make all workers load the weights that `info` selects, the fields of a `CommitInfo`, and
        make vLLM stamp tokens with the version `stamp`. Running requests then recompute their
        caches.

        Workers first end a weight update that an earlier failure left unfinished.

        Raises:
            EngineError: the cache could not be cleared, or a worker failed to load the weights; the
                stamp is then unchanged.
        """
        post = self._control.post
        await self._tell({"do": "settle"})
        # First, while no step runs: a later failure then leaves no stale cache.
        answer = await post(
            "/reset_prefix_cache", reset_running_requests="true", reset_external="true"
        )
        if answer is not None and not answer["success"]:
            raise EngineError(
                f"engine {self.name} could not clear its key-value cache, which the old "
                "weights computed; try again"
            )
        await post("/reset_encoder_cache")
        await post("/start_weight_update")
        await post("/update_weights", {"update_info": dict(info)}, limit="commit_s")
        for state in await self._control.rpc({"do": "state"}):
            if not state["updating"]:
                raise EngineError(f"engine {self.name}: {state['dirty']}")
        await post("/finish_weight_update", {"weight_version": stamp}, limit="commit_s")

    async def _stamp(self, version: int) -> None:
        if self._version_of(await self._control.stamp()) != version:
            await self._control.post("/update_weight_version", {"new_version": str(version)})

    async def _tell(self, command: Mapping[str, Any], *, receiving: bool = False) -> WorkersState:
        """Send a command to all workers, and return the workers' combined state, or raise the first
        error that a worker reports.

        Raises:
            Exception: as in `WorkersState.of`.
        """
        answers = await self._control.rpc(command)
        return WorkersState.of(answers, engine=self.name, receiving=receiving)
