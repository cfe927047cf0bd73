"""Runs an engine in this process: one transformers model that batches requests."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

from megatron_idempotent.rl.weights import Bucket, WeightUpdate

from .protocol import (
    EngineDead,
    EngineError,
    EngineHealth,
    FinishReason,
    PauseMode,
    Request,
    Sample,
    refuse_too_long,
    split_mix,
)
from .transformers_batch import DecodeBatch, RouteRecorder, Turn
from .transformers_weights import ServedWeights, WeightVersions

_TAGS = ("weights", "kv_cache")


class TransformersEngine:
    """Implements `RolloutEngine` and `ColocatedEngine` in this process, with a causal language
    model of the transformers library.

    Requests are batched continuously: they join and leave between two forwards, and requests that
    arrive together with the same prompt compute it once. Forwards run in a thread, so the event
    loop stays free. A sample depends on its seed and the weights; the other requests of the batch
    change only its rounding. After a commit, running requests recompute their cache before their
    next token.

    `stage` copies an update's tensors, and `commit` replaces the model's tensors by these copies:
    from `stage` to `commit` two sets of weights are in memory, and the commit copies nothing.
    Matrices may arrive in FP8 with their scales, and are served in the model's dtype. Every layer
    of the model must use full attention (no sliding windows, no linear attention), as in Llama,
    Qwen2, Qwen3 and Qwen3-MoE.

    Example:
        engine = TransformersEngine("Qwen/Qwen3-0.6B")
        sample = await engine.generate(Request(id="0", prompt=(7, 3), max_tokens=8, seed=1))
    """

    def __init__(
        self,
        model: Any | str | os.PathLike[str],
        *,
        name: str = "local",
        version: int = 0,
        max_running: int = 256,
        prefill_tokens: int = 8192,
        device: str | None = None,
        routed_experts: bool = False,
        adapters: bool = False,
    ) -> None:
        """Load the model, if `model` is a checkpoint's directory, and prepare to serve it.

        Args:
            model: a transformers causal language model, which only the engine may use from then on;
                or a directory with a checkpoint, which is loaded in its own dtype.
            name: the engine's name, unique in a run.
            version: the version of the model's weights.
            max_running: the most requests in one forward; further requests wait.
            prefill_tokens: the most prompt positions that one forward computes.
            device: the device to load a checkpoint to; None for the CPU. A model that is passed
                stays on its device.
            routed_experts: True to return the experts that routers select with each sample.
            adapters: True for a model with PEFT's LoRA: updates then contain only its factors.

        Raises:
            ValueError: a layer's attention is not supported, `routed_experts` is set for a model
                without routers, `adapters` for a model without adapters, or a limit is below 1.
        """
        if max_running < 1 or prefill_tokens < 1:
            raise ValueError(
                f"TransformersEngine() got max_running={max_running} and "
                f"prefill_tokens={prefill_tokens}; allowed: 1 or more"
            )
        if isinstance(model, (str, os.PathLike)):
            model = _load(Path(model), device)
        _check_layers(model.config)
        self.name = name
        self._vocabulary: int = model.config.vocab_size
        self._max_positions: int = model.config.max_position_embeddings
        model.eval()
        served = ServedWeights(model, adapters=adapters)
        self._updates = WeightVersions(served, name=name, version=version)
        self._serving = Scheduler(
            model=model,
            name=name,
            version=version,
            max_running=max_running,
            prefill_tokens=prefill_tokens,
            recorder=RouteRecorder(model) if routed_experts else None,
        )
        self._asleep: set[str] = set()
        self._closed = False

    async def generate(self, request: Request) -> Sample:
        """Check a request against the model, queue it, and return its sample; see
        `RolloutEngine.generate`.

        Raises:
            EngineError: a forward with the request failed.
            EngineDead: the engine was closed.
            ValueError: as in `RolloutEngine.generate`.
        """
        self._check_open()
        lowest, highest = min(request.prompt), max(request.prompt)
        if lowest < 0 or highest >= self._vocabulary:
            raise ValueError(
                f"request {request.id!r} has token {lowest if lowest < 0 else highest}; "
                f"{self.name} has tokens 0 to {self._vocabulary - 1}"
            )
        refuse_too_long(self.name, request, self._max_positions)
        return await self._serving.answer(request)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling; see `RolloutEngine.pause`. In mode "wait", requests that arrive during the
        pause are queued.

        A cancelled call still pauses the engine. A second call with "abort" cuts a "wait" short.

        Raises:
            EngineError: the engine was resumed before the pause was complete.
        """
        self._check_open()
        await self._serving.pause(mode)

    async def resume(self) -> None:
        """Continue sampling after a pause; raise `EngineError` if the weights or the cache are
        missing. See `RolloutEngine.resume`.
        """
        self._check_open()
        if self._trouble:
            raise EngineError(f"{self.name} cannot resume: {self._trouble}")
        self._serving.open()

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """Receive an update's tensors, check them, and keep copies of them for `commit`; see
        `RolloutEngine.stage`.

        Raises:
            EngineError: the weights are asleep.
        """
        self._check_open()
        if "weights" in self._asleep:
            raise EngineError(f"{self.name} is asleep; wake its weights before update {update.id}")
        await self._updates.stage(update, buckets)

    async def commit(self, update_id: str) -> int:
        """Replace the model's tensors by those of the staged update, and have running requests
        recompute their cache; see `RolloutEngine.commit`.
        """
        self._check_open()
        version = self._updates.committed(update_id)
        if version is not None:
            return version
        if not self._serving.shut:
            raise EngineError(
                f"{self.name} cannot commit update {update_id}: it is not paused; pause it first"
            )
        version = self._updates.commit(update_id)
        self._serving.version = version
        self._serving.recompute()
        return version

    async def rollback(self, update_id: str) -> None:
        """Drop a staged update, or restore the weights from before a failed commit; see
        `RolloutEngine.rollback`.

        Also cancels an update that is still being staged.

        Raises:
            EngineError: the previous weights cannot be restored.
        """
        self._check_open()
        await self._updates.rollback(update_id)

    async def health(self) -> EngineHealth:
        """Return the engine's status and weight version; see `RolloutEngine.health`.

        An engine that sleeps or has no weights yet is DIRTY.
        """
        version, running = self._updates.version, self._serving.running
        if self._closed:
            return EngineHealth(status="DEAD", version=None, detail="closed")
        if version is None:
            return EngineHealth(status="DIRTY", version=None, detail=self._trouble, running=running)
        shut = self._serving.shut
        return EngineHealth(
            status="PAUSED" if shut else "SERVING",
            version=version,
            detail=self._trouble if shut else "",
            running=running,
            decode_s=self._updates.decode_s,
        )

    async def close(self) -> None:
        """End all requests, free weights and cache, and end the thread that runs forwards; see
        `RolloutEngine.close`.
        """
        if self._closed:
            return
        self._closed = True
        await self._stop()
        await self._updates.free("closed")
        self._serving.close()

    async def sleep(self) -> None:
        """Free the memory of weights and key-value cache, and drop a staged update; see
        `ColocatedEngine.sleep`.
        """
        self._check_open()
        if self._asleep:
            return
        self._asleep.update(_TAGS)
        await self._stop()
        await self._updates.free("its weights were freed; wake them, then stage and commit all")

    async def wake(self, tags: Sequence[str]) -> None:
        """Mark "weights" or "kv_cache" (`tags`) as awake; the next commit or forward then allocates
        the memory. The engine stays paused. See `ColocatedEngine.wake`.

        Memory is allocated on use: the model has no weights until an update is committed.

        Raises:
            ValueError: a tag is neither "weights" nor "kv_cache".
            EngineError: the cache would wake before the weights.
        """
        self._check_open()
        unknown = sorted(set(tags) - set(_TAGS))
        if unknown:
            raise ValueError(f"wake() got {unknown}; allowed: {list(_TAGS)}")
        still_asleep = self._asleep - set(tags)
        if still_asleep == {"weights"}:
            raise EngineError(
                f"{self.name} cannot wake its cache while its weights are asleep; "
                'wake "weights" first'
            )
        self._asleep = still_asleep

    @property
    def _trouble(self) -> str:
        """The reason why the engine cannot serve (no weights, mixed weights, or an asleep cache);
        empty if it can.
        """
        if self._updates.trouble:
            return self._updates.trouble
        return 'its cache is asleep; wake "kv_cache"' if self._asleep else ""

    async def _stop(self) -> None:
        await self._serving.pause("keep")
        self._serving.give_back()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead(f"{self.name} was closed; make a new engine")


def _load(directory: Path, device: str | None) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    return model if device is None else model.to(device)


def _check_layers(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"the {config.model_type} model has layers of {sorted(kinds)}: TransformersEngine "
            "serves full attention only; serve it with vLLM"
        )


#: SplitMix64's constants, from which each token's random number is made; changing them changes
#: every sample.
_STEP, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class RequestSlot:
    """A waiting or running request: its sampled tokens so far, and the future on which the caller
    waits for the sample.

    Example: `RequestSlot(order=7, request=request, seed=5, answer=loop.create_future())`.
    """

    order: int
    """The position of this request in the order of arrival."""
    request: Request
    seed: int
    answer: asyncio.Future[Sample]
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    recorder: RouteRecorder | None = None
    routes: bytearray = dataclasses.field(default_factory=bytearray)
    """The experts of all tokens except the last, each as it was first computed."""

    def turn(self) -> Turn:
        """Return the inputs with which `DecodeBatch.draw` samples the request's next token: the
        last token so far, a random number computed from seed and position, and the temperature.

        The random number in [0, 1) is a hash of the seed and the token's position, so it does not
        depend on the batch or on earlier aborts.
        """
        position = self.request.continued + len(self.tokens)
        state = split_mix(self.seed * _STEP + _MIX) + (position + 1) * _STEP
        token = self.tokens[-1] if self.tokens else self.request.prompt[-1]
        return token, (split_mix(state) >> 11) * 2.0**-53, self.request.temperature

    def take(self, token: int, logprob: float, version: int) -> None:
        """Append a sampled token with its log-prob and weight version; finish the request if this
        token ends the response.
        """
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.request.stop_tokens:
            self.finish("stop")
        elif len(self.tokens) == self.request.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """Give the waiting caller a `Sample` with the tokens so far and the finish reason `reason`;
        a no-op if the caller was cancelled.
        """
        if not self.answer.done():
            self.answer.set_result(
                Sample(
                    request_id=self.request.id,
                    tokens=tuple(self.tokens),
                    logprobs=tuple(self.logprobs),
                    versions=tuple(self.versions),
                    finish_reason=reason,
                    routed_experts=self.recorder.recorded(bytes(self.routes))
                    if self.recorder is not None and self.tokens
                    else None,
                )
            )

    def fail(self, error: Exception) -> None:
        """Make the waiting caller raise `error`; a no-op if the caller was cancelled."""
        if not self.answer.done():
            self.answer.set_exception(error)


T = TypeVar("T")


@dataclasses.dataclass(eq=False, kw_only=True)
class Scheduler:
    """Samples the responses to an engine's requests in continuous batches, one forward of the model
    after the other.

    All state belongs to the event loop; forwards run in a separate thread. Between two forwards,
    rows join and leave, and a shut gate stops the loop. The task that runs the loop exists only
    while there is something to compute.

    Example: `Scheduler(model=model, name="a", version=0, max_running=8, prefill_tokens=64)`.
    """

    model: Any
    """The model to sample from."""
    name: str
    """The engine's name, for errors."""
    version: int
    """The version of the model's weights, recorded with each token."""
    max_running: int
    """The most rows in a batch; further requests wait."""
    prefill_tokens: int
    """The most positions, padding included, that one forward computes for new rows."""
    recorder: RouteRecorder | None = None
    """Records the experts of each forward; None for samples without them."""

    def __post_init__(self) -> None:
        self._batch = DecodeBatch(self.model, self.recorder)
        self._gate: Literal["open", "draining", "shut"] = "open"
        self._taken = 0
        self._admitted = math.inf
        self._waiting: dict[int, RequestSlot] = {}
        self._joining: list[RequestSlot] = []
        self._rows: list[RequestSlot] = []
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"engine-{self.name}")

    @property
    def shut(self) -> bool:
        """True if sampling is paused: no forward is running, and none starts until `open()`."""
        return self._gate == "shut" and self._task is None

    @property
    def running(self) -> int:
        """The number of requests that were accepted and are not finished."""
        return len(self._waiting) + len(self._joining) + len(self._rows)

    async def answer(self, request: Request) -> Sample:
        """Queue a request, wait until its response is sampled, and return the sample. The request
        waits while sampling is paused or the batch has no free row.
        """
        slot = RequestSlot(
            order=self._taken,
            request=request,
            seed=secrets.randbits(64) if request.seed is None else request.seed,
            answer=asyncio.get_running_loop().create_future(),
            recorder=self.recorder,
        )
        self._taken += 1
        self._waiting[slot.order] = slot
        self._go()
        try:
            return await slot.answer
        finally:
            self._waiting.pop(slot.order, None)
            if slot.answer.cancelled() and self._task is None:
                self._sweep()  # a running task does it after its forward

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling, and wait until no forward is running. Mode "wait" first finishes the
        requests that arrived before the pause, "abort" ends all requests early, and "keep" lets the
        requests continue after `open()`.

        A cancelled call still stops sampling.

        Raises:
            EngineError: the gate was opened again before sampling had stopped.
        """
        returned = mode == "abort" and not self.shut
        if mode != "wait":
            self._gate = "shut"
        elif self._gate == "open":
            self._gate, self._admitted = "draining", self._taken
            self._go()
        while self._task is not None and not self._opened():
            await self._changed.wait()
        if self._opened():
            raise EngineError(f"{self.name} was resumed while it was about to pause; pause again")
        if returned:
            self.give_back()

    def open(self) -> None:
        """Continue sampling after a pause; a call of `pause` that is still waiting then raises
        `EngineError`.
        """
        self._gate, self._admitted = "open", math.inf
        self._wake_pauses()
        self._go()

    def give_back(self) -> None:
        """End all requests with finish reason "abort" and their tokens so far, and free the cache.
        Call it only while sampling is paused.
        """
        for slot in self._forget():
            slot.finish("abort")

    def recompute(self) -> None:
        """Drop the key-value cache, and queue the running requests again: their next forward
        recomputes the keys and values of their tokens so far. Call it only while sampling is
        paused.
        """
        running = {slot.order: slot for slot in self._rows}
        self._rows.clear()
        self._batch.clear()
        self._waiting = {**dict(sorted(running.items())), **self._waiting}

    def close(self) -> None:
        """End the thread that runs forwards. Call it only while sampling is paused."""
        self._thread.shutdown(wait=False)

    def _opened(self) -> bool:
        return self._gate == "open"

    def _go(self) -> None:
        if self._gate != "shut" and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._serve())

    def _wake_pauses(self) -> None:
        """Wake the calls of `pause` that are waiting: the loop of forwards has ended, or `open` was
        called.
        """
        self._changed.set()
        self._changed = asyncio.Event()

    async def _serve(self) -> None:
        try:
            while self._gate != "shut":
                self._sweep()
                sequences = self._next_sequences()
                if sequences:
                    await self._join(sequences)
                elif self._rows:
                    await self._draw()
                else:
                    break
            self._sweep()
        except BaseException as error:
            # The event loop ends, or this is a bug. A forward may still write to the old batch.
            self._batch = DecodeBatch(self.model, self.recorder)
            for slot in self._forget():
                slot.fail(self._error("its serving task ended", error))
            raise
        finally:
            self._task = None
            if self._gate == "draining":
                self._gate = "shut"
            self._wake_pauses()

    def _sweep(self) -> None:
        """Remove the rows of finished and cancelled requests from the batch and its cache."""
        ended_rows = [row for row, slot in enumerate(self._rows) if slot.answer.done()]
        if ended_rows:
            self._rows = [self._rows[old_row] for old_row in self._batch.leave(ended_rows)]

    def _next_sequences(self) -> dict[tuple[int, ...], list[RequestSlot]]:
        """Choose the waiting requests that the next forward prefills, within the limits of rows and
        positions. Return a map from the tokens to prefill to the requests that have exactly these
        tokens, so that a sequence is computed once.
        """
        room = self.max_running - len(self._rows)
        slots_of: dict[tuple[int, ...], list[RequestSlot]] = {}
        for slot in itertools.islice(self._waiting.values(), max(room, 0)):
            if slot.order < self._admitted:
                # The cache holds all tokens except the last one.
                computed = (*slot.request.prompt, *slot.tokens)[:-1]
                slots_of.setdefault(computed, []).append(slot)
        # Sorted by length: similar lengths need little padding. Long sequences wait.
        batch: dict[tuple[int, ...], list[RequestSlot]] = {}
        for sequence in sorted(slots_of, key=len):
            if batch and len(sequence) * (len(batch) + 1) > self.prefill_tokens:
                break
            batch[sequence] = slots_of[sequence]
        return batch

    async def _join(self, sequences: dict[tuple[int, ...], list[RequestSlot]]) -> None:
        numbered = [
            (number, slot) for number, slots in enumerate(sequences.values()) for slot in slots
        ]
        self._joining = [slot for _, slot in numbered]
        for slot in self._joining:
            del self._waiting[slot.order]
        which = [number for number, _ in numbered]
        if await self._compute(self._joining, self._batch.join, list(sequences), which) is not None:
            self._rows.extend(self._joining)
            for slot, routes in zip(self._joining, self._batch.routes, strict=False):
                slot.routes += routes[len(slot.routes) :]
        self._joining = []

    async def _draw(self) -> None:
        rows = self._rows
        drawn = await self._compute(rows, self._batch.draw, [slot.turn() for slot in rows])
        if drawn is None:
            return
        for slot, routes in zip(rows, self._batch.routes, strict=False):
            slot.routes += routes
        for slot, token, logprob in zip(rows, *drawn, strict=True):
            if math.isnan(logprob):
                slot.fail(
                    EngineError(
                        f"{self.name}: the logits of request {slot.request.id!r} are not finite "
                        f"after {len(slot.tokens)} tokens, with weights of version {self.version}; "
                        "are these weights finite?"
                    )
                )
            else:
                slot.take(token, logprob, self.version)

    async def _compute(
        self, slots: Sequence[RequestSlot], method: Callable[..., T], *arguments: Any
    ) -> T | None:
        """Call `method` of the batch in the thread that runs forwards, and return the result. If
        `method` raises, make the callers that wait for `slots` raise the error, and return None.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, method, *arguments
            )
        except Exception as error:  # noqa: BLE001 - the requests' callers get any error of the model
            for slot in slots:
                slot.fail(self._error(f"a forward of {len(slots)} requests failed", error))
            return None

    def _forget(self) -> list[RequestSlot]:
        """Remove all waiting and running requests, and free the key-value cache. Return the list of
        the removed requests' slots; the caller ends or fails them.
        """
        slots = [*self._rows, *self._joining, *self._waiting.values()]
        self._rows, self._joining, self._waiting = [], [], {}
        self._batch.clear()
        return slots

    def _error(self, event: str, cause: BaseException) -> EngineError:
        error = EngineError(f"{self.name}: {event}: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error
