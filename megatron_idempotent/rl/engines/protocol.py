"""Defines the protocol of every inference engine, its inputs and results, and its errors.

`tests/rl/engines/contract.py` holds every engine to it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Literal, Protocol

from megatron_idempotent.rl.weights import Bucket, UpdateRefused, WeightUpdate

FinishReason = Literal["stop", "length", "abort"]
"""The reason why a sample ends: a stop token, its longest length, or that it was aborted."""

PauseMode = Literal["keep", "abort", "wait"]
"""The treatment of running requests at a pause. "keep": they stay, and go on at `resume`. "abort":
they come back at once as partials. "wait": the pause waits for them to end."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Asks for one response.

    Example: `Request(id="0/17/3", prompt=(7, 3, 4), max_tokens=32, stop_tokens=(2,), seed=5)`.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    """Longest response in tokens, the stop token included."""
    stop_tokens: tuple[int, ...] = ()
    """Ids that end a response; the one that did is its last token."""
    temperature: float = 1.0
    seed: int | None = None
    """The seed of the sample; None for a random one. With the same seed, weights and prompt the
    tokens are the same, except that other batches may round otherwise."""
    continued: int = 0
    """The number of `prompt`'s last tokens that were sampled already, by an aborted part."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.id!r} has an empty prompt; give at least one token")
        if self.max_tokens < 1:
            raise ValueError(
                f"request {self.id!r} has max_tokens={self.max_tokens}; allowed: 1 or more"
            )
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"request {self.id!r} has temperature={self.temperature}; allowed: above 0"
            )
        if not 0 <= self.continued < len(self.prompt):
            raise ValueError(
                f"request {self.id!r} has continued={self.continued} and a prompt of "
                f"{len(self.prompt)} tokens; allowed: 0 to one fewer than those"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoutedExperts:
    """Holds the experts that an engine's routers took for some tokens, for router replay.

    A number takes one byte up to 256 experts, and two for more.
    Example: `RoutedExperts(data=bytes([0, 3, 1, 2]), layers=2, topk=2).tokens == 1`.
    Errors: `ValueError` for bytes of no whole number of tokens.
    """

    data: bytes = dataclasses.field(repr=False)
    """The numbers of experts, of `dtype`: [tokens, layers with routers, experts of a token]."""
    layers: int
    topk: int
    dtype: Literal["uint8", "int16"] = "uint8"

    def __post_init__(self) -> None:
        if len(self.data) % self._token_bytes:
            raise ValueError(
                f"routed experts of {self.layers} layers and {self.topk} experts each have "
                f"{len(self.data)} bytes; allowed: a multiple of {self._token_bytes}"
            )

    @property
    def _token_bytes(self) -> int:
        return self.layers * self.topk * (2 if self.dtype == "int16" else 1)

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return len(self.data) // self._token_bytes

    def numbers(self) -> Any:
        """Return the numbers as an array of NumPy, [tokens, layers, topk]."""
        import numpy

        flat: Any = numpy.frombuffer(self.data, self.dtype)
        return flat.reshape(self.tokens, self.layers, self.topk)

    def then(self, longer: RoutedExperts) -> RoutedExperts:
        """Return these, and after them the tokens that only `longer` has."""
        data = self.data + longer.data[len(self.data) :]
        return dataclasses.replace(longer, data=data)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Holds a response, or the part of it that was there when the engine was told to stop.

    `logprobs` are natural, of the distribution that tokens were drawn from (with temperature), and
    `versions` are those of the weights that each token was drawn with. Both have an entry per
    token.
    Example: `Sample(request_id="0/17/3", tokens=(5, 2), logprobs=(-0.1, -0.2), versions=(3, 4),
    finish_reason="stop")`.
    """

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    routed_experts: RoutedExperts | None = None
    """The experts of each token of prompt and response but the last one, which no engine runs, as
    they were when the token after it was drawn. None if the engine was not told to return them, or
    has drawn nothing."""

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"sample {self.request_id!r} has {len(self.tokens)} tokens, {len(self.logprobs)} "
                f"log-probs and {len(self.versions)} versions; allowed: one of each per token"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineHealth:
    """Reports an engine's state. Example: `(await engine.health()).status == "SERVING"`."""

    status: Literal["SERVING", "PAUSED", "DIRTY", "DEAD"]
    """The engine's state. DIRTY: its weights may be of more than one version, so it must not serve.
    DEAD: it does not answer."""
    version: int | None
    """The version of the engine's weights; None if none is known, as in DIRTY and DEAD."""
    detail: str = ""
    """The reason why the engine is DIRTY or DEAD."""
    running: int = 0
    """The number of requests that the engine has taken and not answered."""
    wants_all: bool = False
    """True if the next update has to bring every tensor."""
    decode_s: float = 0.0
    """Seconds in which the engine checked and decoded the deltas of the last update."""


class RolloutEngine(Protocol):
    """Samples responses, and takes new weights while it serves.

    An update is staged beside the weights in use, then committed while the engine is paused. Every
    method may raise `EngineDead` (no answer any more) or `EngineTimeout`.
    """

    @property
    def name(self) -> str:
        """The engine's name, unique in a run; errors and health reports use it."""
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
        """Stop between two tokens; after the return no token is drawn. Paused already: no-op."""
        ...

    async def resume(self) -> None:
        """Draw tokens again. Not paused: no-op. Errors: `EngineError` if the engine is DIRTY."""
        ...

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """Take the update's weights beside those in use, and check them; the engine keeps serving.

        A second update takes the place of one that was staged and not committed. To stage the
        update that was committed last is a no-op (its buckets are not read).
        Errors: `UpdateRefused` for a version not above the engine's own, a base that is not what it
            serves, or another update being staged at this moment; `UpdateMismatch` and
            `UpdateDamaged` for tensors that do not fit or did not arrive as they were sent;
            `EngineUnsupported` for scales of a key-value cache that it does not keep in FP8. After
            any of them nothing is staged, and what is served has not changed.
        """
        ...

    async def commit(self, update_id: str) -> int:
        """Serve the staged update from now on; return its version. The engine must be paused.

        Tokens of running requests that were drawn before keep their version; tokens that are drawn
        after it attend to a recomputed cache. Idempotent: with the id of the last commit it does
        nothing and returns its version.
        Errors: `EngineError` for an id that is not staged, or if the engine is not paused. If it
            fails half-way the engine is DIRTY, and may be told to commit again.
        """
        ...

    async def rollback(self, update_id: str) -> None:
        """Forget an update that is staged, or has left weights torn, and serve those before it.

        Unknown ids, and those of updates that are committed in full: no-op. An engine that cannot
        restore its weights stays DIRTY.
        """
        ...

    async def health(self) -> EngineHealth:
        """Return the version and the status. Never raises: no answer in time is DEAD."""
        ...

    async def close(self) -> None:
        """Release what the engine holds; running requests come back as partials. Twice: no-op."""
        ...


class ColocatedEngine(RolloutEngine, Protocol):
    """Shares the trainer's device, and gives its memory back between rollouts."""

    async def sleep(self) -> None:
        """Free weights and cache. Asleep: no-op. Running requests come back as partials."""
        ...

    async def wake(self, tags: Sequence[str]) -> None:
        """Take the memory of "weights" or of "kv_cache" again; wake weights first, then load them.

        Until both are awake `resume` is refused; until weights are loaded no version is known.
        """
        ...


class EngineError(RuntimeError):
    """An engine could not do what it was told; the message names the engine."""


class EngineDead(EngineError):
    """The engine does not answer any more; its running requests are lost and can be sent again."""


class EngineTimeout(EngineError):
    """The engine has not answered in time; what it did is unknown until its health is asked."""


class EngineUnsupported(EngineError):
    """The engine, as it was started, lacks what was asked for; the message says how to get it."""


def refuse_kv_scales(engine: str, update: WeightUpdate, why: str) -> None:
    """Raise `EngineUnsupported` if an update brings scales to an engine that takes none.

    Example: `refuse_kv_scales("engine-0", update, "its key-value cache is not FP8")`.
    """
    if update.kv_scales is not None:
        raise EngineUnsupported(
            f"engine {engine}: update {update.id} brings {len(update.kv_scales)} kv_scales, and "
            f"{why}; leave kv_scales out"
        )


def refuse_out_of_turn(
    engine: str, update: WeightUpdate, *, least: int, serving: int | None, staging: str = ""
) -> None:
    """Raise `UpdateRefused` if an update comes too late, on another base, or beside another.

    `least` is the lowest version that the engine takes, `serving` the one version that it serves,
    if it does, and `staging` the id of the update that it is receiving.
    Example: `refuse_out_of_turn("engine-0", update, least=4, serving=3)`.
    """
    found = f"{engine}: update {update.id} of version {update.version}"
    if staging:
        raise UpdateRefused(
            f"{found} came while {staging} is being staged; wait for that one, or roll it back"
        )
    if update.version < least:
        raise UpdateRefused(f"{found} came after version {least - 1}; send {least} or later")
    if update.base_version not in (None, serving):
        served = "no version" if serving is None else f"version {serving}"
        raise UpdateRefused(
            f"{found} builds on version {update.base_version}, and {served} is served; send every "
            "tensor"
        )


def split_mix(state: int) -> int:
    """Return 64 bits that hash a state, as SplitMix64 (Steele, Lea and Flood 2014) mixes its own.

    Engines make of it the numbers that choose tokens, from a request's seed and place.
    """
    mask = (1 << 64) - 1
    state &= mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


async def both_ends(*calls: Coroutine[Any, Any, None]) -> None:
    """Run the calls of both ends of a transfer at once; if one fails, cancel the other.

    Example: `await both_ends(engine.pause(), engine.sleep())`.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
