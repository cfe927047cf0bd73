"""Defines the protocol of every inference engine: inputs, results and errors.

`tests/rl/engines/contract.py` tests every engine against it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Literal, Protocol

from megatron_idempotent.rl.weights import Bucket, UpdateRefused, WeightUpdate

FinishReason = Literal["stop", "length", "abort"]
"""The reason why a sample ends: a stop token, `max_tokens` tokens, or an abort."""

PauseMode = Literal["keep", "abort", "wait"]
"""Selects what a pause does with running requests. "keep": they stop and continue at `resume`.
"abort": they return at once with the tokens so far. "wait": the pause waits until they end."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request to sample one response to a prompt; prompt and response are token ids.

    Example: `Request(id="0/17/3", prompt=(7, 3, 4), max_tokens=32, stop_tokens=(2,), seed=5)`.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    """The maximum length of the response in tokens, including the stop token."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end a response; the response includes the stop token."""
    temperature: float = 1.0
    seed: int | None = None
    """The seed of the sample; None for a random one. The same seed, weights and prompt give the
    same tokens, unless another batch composition rounds differently."""
    continued: int = 0
    """The number of tokens at the end of `prompt` that are response tokens of an aborted part."""

    def __post_init__(self) -> None:
        if not self.prompt:
            fact = "an empty prompt; give at least one token"
        elif self.max_tokens < 1:
            fact = f"max_tokens={self.max_tokens}; allowed: 1 or more"
        elif not 0 < self.temperature < math.inf:
            fact = f"temperature={self.temperature}; allowed: above 0"
        elif not 0 <= self.continued < len(self.prompt):
            prompt = f"a prompt of {len(self.prompt)} tokens; allowed: 0 to one fewer than those"
            fact = f"continued={self.continued} and {prompt}"
        else:
            return
        raise ValueError(f"request {self.id!r} has {fact}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoutedExperts:
    """The experts that the routers of an engine's model selected for a sequence of tokens, so that
    the trainer can replay the routing.

    An expert's number takes one byte for up to 256 experts, else two.

    Raises:
        ValueError: the length of `data` is not a multiple of one token's bytes.

    Example: `RoutedExperts(data=bytes([0, 3, 1, 2]), layers=2, topk=2).tokens == 1`.
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
        """The number of tokens for which `data` has the selected experts."""
        return len(self.data) // self._token_bytes

    def numbers(self) -> Any:
        """Return the indices of the selected experts as a NumPy array, [tokens, layers, topk]."""
        import numpy

        flat: Any = numpy.frombuffer(self.data, self.dtype)
        return flat.reshape(self.tokens, self.layers, self.topk)

    def then(self, longer: RoutedExperts) -> RoutedExperts:
        """Return a copy of `longer`, a record that begins with this record's tokens, in which these
        tokens have this record's experts.
        """
        data = self.data + longer.data[len(self.data) :]
        return dataclasses.replace(longer, data=data)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A sampled response, or the part that was sampled before the engine aborted the request: its
    tokens, with a log-prob and a weight version for each token.

    `logprobs` are natural logarithms, under the distribution that tokens were sampled from (after
    temperature). `versions` are the versions of the weights that sampled each token. Both have an
    entry per token.

    Example: `Sample(request_id="0/17/3", tokens=(5, 2), logprobs=(-0.1, -0.2), versions=(3, 4),
    finish_reason="stop")`.
    """

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    routed_experts: RoutedExperts | None = None
    """The experts of every token of prompt and response except the last, which no engine runs. Each
    is as it was when the next token was sampled. None if the engine does not record experts or
    sampled no token."""

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"sample {self.request_id!r} has {len(self.tokens)} tokens, {len(self.logprobs)} "
                f"log-probs and {len(self.versions)} versions; allowed: one of each per token"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineHealth:
    """An engine's status and weight version, as `health` returns them.
    Example: `(await engine.health()).status == "SERVING"`.
    """

    status: Literal["SERVING", "PAUSED", "DIRTY", "DEAD"]
    """SERVING or PAUSED in normal use. DIRTY: the weights may mix several versions, so the engine
    must not serve. DEAD: the engine does not respond."""
    version: int | None
    """The version of the engine's weights; None if it is unknown, as for DIRTY and DEAD."""
    detail: str = ""
    """The reason why the engine is DIRTY or DEAD."""
    running: int = 0
    """The number of requests that the engine accepted and has not finished."""
    wants_all: bool = False
    """True if the next update must contain every tensor."""
    decode_s: float = 0.0
    """Seconds that the engine spent to check and decode the deltas of the last update."""


class RolloutEngine(Protocol):
    """The protocol of every inference engine: it samples responses, and receives new weights while
    it serves the current ones.

    `stage` loads an update into memory in addition to the served weights, and `commit` switches to
    it while the engine is paused. Every method may raise `EngineDead` or `EngineTimeout`.
    """

    @property
    def name(self) -> str:
        """The engine's name, unique in a run; errors and health reports use it."""
        ...

    async def generate(self, request: Request) -> Sample:
        """Sample one response to a request. Calls may overlap; requests wait while the engine is
        paused.

        A pause in mode "abort" ends the request early with `finish_reason="abort"` and the tokens
        so far, possibly none. Cancelling the call frees the request's resources.

        Raises:
            ValueError: the model can never serve the request: a token is outside its vocabulary, or
                prompt and response need more positions than it has.
        """
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling; after the return, no token is sampled until `resume`. If already paused:
        no-op.
        """
        ...

    async def resume(self) -> None:
        """Continue sampling after a pause. If not paused: no-op.

        Raises:
            EngineError: the engine is DIRTY.
        """
        ...

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """Receive an update's weights, check them, and keep them for `commit`, while the engine
        serves its current weights.

        A new update replaces one that was staged but not committed. Staging the update that was
        committed last is a no-op that reads no bucket. After an error nothing is staged, and the
        served weights are unchanged.

        Raises:
            UpdateRefused: the version is not above the served one, the update builds on a version
                that is not served, or another update is being staged.
            UpdateMismatch: names, shapes or types differ from the model's.
            UpdateDamaged: tensors did not arrive as they were sent.
            EngineUnsupported: the update has key-value cache scales, and the engine's cache is not
                in FP8.
        """
        ...

    async def commit(self, update_id: str) -> int:
        """Replace the served weights by those of the staged update; return the update's version.
        The engine must be paused.

        Running requests keep the versions of the tokens sampled so far, and continue on a
        recomputed cache. Repeating the last commit does nothing and returns its version. If a
        commit fails midway, the engine is DIRTY, and the caller may commit again.

        Raises:
            EngineError: the update is not staged, the engine is not paused, or the commit failed.
        """
        ...

    async def rollback(self, update_id: str) -> None:
        """Drop the staged update. If a commit of this update failed midway, restore the weights
        from before the commit.

        Unknown ids and completed commits: no-op. An engine that cannot restore the previous weights
        stays DIRTY.
        """
        ...

    async def health(self) -> EngineHealth:
        """Return the engine's status and weight version. Never raises: an engine without a timely
        response is DEAD.
        """
        ...

    async def close(self) -> None:
        """Release all of the engine's resources; running requests end with "abort". A second call
        is a no-op.
        """
        ...


class ColocatedEngine(RolloutEngine, Protocol):
    """The protocol of an engine on the trainer's device: it can free its memory (`sleep`) and
    allocate it again (`wake`), so that the trainer can use it between rollouts.
    """

    async def sleep(self) -> None:
        """Free the memory of weights and key-value cache; running requests end with "abort". If
        asleep: no-op.
        """
        ...

    async def wake(self, tags: Sequence[str]) -> None:
        """Allocate again the memory that `tags` names: "weights", "kv_cache" or both. Wake the
        weights first, then load them by an update.

        `resume` fails until both are awake. The version is unknown until weights are loaded.
        """
        ...


class EngineError(RuntimeError):
    """An engine could not carry out a command; the message names the engine."""


class EngineDead(EngineError):
    """The engine no longer responds; its running requests are lost and can be sent again."""


class EngineTimeout(EngineError):
    """The engine did not respond in time; only `health` tells whether the engine carried out the
    command.
    """


class EngineUnsupported(EngineError):
    """The engine was started without a required feature; the message says how to enable the
    feature.
    """


def refuse_too_long(engine: str, request: Request, positions: int) -> None:
    """Raise `ValueError` if the prompt and the response of a request need more than `positions`
    positions. Engines call this function before they accept a request.

    Example: `refuse_too_long("engine-0", request, 4096)`.
    """
    needed = len(request.prompt) + request.max_tokens
    if needed > positions:
        raise ValueError(
            f"request {request.id!r} has a prompt of {len(request.prompt)} tokens and "
            f"max_tokens={request.max_tokens}, {needed} together; {engine} has {positions} "
            "positions: ask for fewer tokens"
        )


def refuse_kv_scales(engine: str, update: WeightUpdate, reason: str) -> None:
    """Raise `EngineUnsupported` if an update has `kv_scales`. Engines that do not support these
    scales call this function before they stage an update.

    Example: `refuse_kv_scales("engine-0", update, "its key-value cache is not FP8")`.
    """
    if update.kv_scales is not None:
        raise EngineUnsupported(
            f"engine {engine}: update {update.id} brings {len(update.kv_scales)} kv_scales, and "
            f"{reason}; leave kv_scales out"
        )


def refuse_out_of_turn(
    engine: str, update: WeightUpdate, *, least: int, serving: int | None, staging: str = ""
) -> None:
    """Raise `UpdateRefused` if an engine must not stage an update now: another update is being
    staged, the update's version is below `least`, or it builds on another version than the engine
    serves.

    Args:
        engine: the engine's name, for the message.
        update: the update that is about to be staged.
        least: the lowest version that the engine accepts.
        serving: the version that the engine serves; None if it serves no single version.
        staging: the id of an update that is being staged; empty if there is none.

    Example: `refuse_out_of_turn("engine-0", update, least=4, serving=3)`.
    """
    subject = f"{engine}: update {update.id} of version {update.version}"
    if staging:
        raise UpdateRefused(
            f"{subject} came while {staging} is being staged; wait for that one, or roll it back"
        )
    if update.version < least:
        raise UpdateRefused(f"{subject} came after version {least - 1}; send {least} or later")
    if update.base_version not in (None, serving):
        served = "no version" if serving is None else f"version {serving}"
        raise UpdateRefused(
            f"{subject} builds on version {update.base_version}, and {served} is served; send "
            "every tensor"
        )


def split_mix(state: int) -> int:
    """Return a 64-bit hash of `state`, by the mixer of SplitMix64 (Steele, Lea and Flood 2014).

    Engines derive from it the random number of each token, given a request's seed and the token's
    position.
    """
    mask = (1 << 64) - 1
    state &= mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


async def both_ends(*calls: Coroutine[Any, Any, None]) -> None:
    """Run coroutines concurrently, such as the sending and the receiving end of a transfer, until
    all have ended; if one fails, cancel the others and raise its error.

    Example: `await both_ends(engine.pause(), engine.sleep())`.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
