"""Inputs and results of an engine."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
"""Why a sample ends: at a stop token, at its longest length, or because the engine was told to."""

PauseMode = Literal["keep", "abort", "wait"]
"""The treatment of running requests: they stay and go on at `resume`; they come back at once as
partials; or the pause waits for them to end."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One response to be sampled.

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
    """Same seed, weights and prompt: the same tokens, up to the rounding of other batches."""
    continued: int = 0
    """The number of `prompt`'s last tokens that were sampled already, by an aborted part."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.id!r} has an empty prompt; give at least one token")
        if self.max_tokens < 1:
            raise ValueError(f"request {self.id!r} has max_tokens={self.max_tokens}; 1 or more")
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"request {self.id!r} has temperature={self.temperature}; a number above 0"
            )
        if not 0 <= self.continued < len(self.prompt):
            raise ValueError(
                f"request {self.id!r} has continued={self.continued} and a prompt of "
                f"{len(self.prompt)} tokens; the first of them was given"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A response, or the part of it that was there when the engine was told to stop.

    `logprobs` are natural, of the distribution drawn from (temperature applied), and `versions`
    those of the weights that each token was drawn with; both have an entry per token.
    Example: `Sample(request_id="0/17/3", tokens=(5, 2), logprobs=(-0.1, -0.2), versions=(3, 4),
    finish_reason="stop")`.
    """

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"sample {self.request_id!r} has {len(self.tokens)} tokens, {len(self.logprobs)} "
                f"log-probs and {len(self.versions)} versions; one of each per token"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineHealth:
    """The state that an engine reports. Example: `(await engine.health()).status == "SERVING"`."""

    status: Literal["SERVING", "PAUSED", "DIRTY", "DEAD"]
    """DIRTY: its weights may be of more than one version, so it must not serve. DEAD: no answer."""
    version: int | None
    """Version of its weights; None where none is known, as in DIRTY and DEAD."""
    detail: str = ""
    """Why it is DIRTY or DEAD."""
    running: int = 0
    """Requests that it has taken and not answered."""
