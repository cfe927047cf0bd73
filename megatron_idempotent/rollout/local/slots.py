"""A request on its way through the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets

from megatron_idempotent.rollout.records import FinishReason, Request, Sample
from megatron_idempotent.rollout.uniforms import fold_seed

from .batch import Turn


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class Slot:
    """A running request: the tokens that were drawn so far, and the future that waits for them.

    Example: `Slot(order=7, request=request, answer=loop.create_future())`.
    """

    order: int
    """Counts the requests that the engine has taken."""
    request: Request
    answer: asyncio.Future[Sample]
    seed: int = dataclasses.field(init=False)
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        given = self.request.seed
        self.seed = fold_seed(secrets.randbits(64) if given is None else given)

    def computed(self) -> tuple[int, ...]:
        """The tokens in its cache: all but the last one."""
        return (*self.request.prompt, *self.tokens)[:-1]

    def turn(self) -> Turn:
        """The inputs of its next token."""
        request = self.request
        return Turn(
            token=self.tokens[-1] if self.tokens else request.prompt[-1],
            place=request.continued + len(self.tokens),
            seed=self.seed,
            temperature=request.temperature,
        )

    def take(self, token: int, logprob: float, version: int) -> None:
        """Add a token, and answer where it was the last one."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.request.stop_tokens:
            self.finish("stop")
        elif len(self.tokens) == self.request.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """Answer with what is there; a no-op where the caller has gone."""
        if not self.answer.done():
            self.answer.set_result(
                Sample(
                    request_id=self.request.id,
                    tokens=tuple(self.tokens),
                    logprobs=tuple(self.logprobs),
                    versions=tuple(self.versions),
                    finish_reason=reason,
                )
            )

    def fail(self, error: Exception) -> None:
        """Answer with an error; a no-op where the caller has gone."""
        if not self.answer.done():
            self.answer.set_exception(error)
