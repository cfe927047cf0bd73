"""What an engine's work takes, in virtual seconds."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineCosts:
    """What an engine's work takes.

    A decode step of a batch of n requests takes `step_s + n * request_s` and brings each of them
    one token: memory-bound for small batches, and never more than 1 / request_s tokens a second.
    """

    slots: int = 64
    """Requests that run at once; more wait in the engine."""
    step_s: float = 0.02
    request_s: float = 0.0002
    prompt_tokens: float = 0.0
    """Tokens' worth of time before the first token of a response, or of what is left of it."""
    bucket_s: float = 0.5
    """To take one bucket of weights; it serves meanwhile."""
    pause_s: float = 0.02
    commit_s: float = 0.5
    resume_s: float = 0.01

    def __post_init__(self) -> None:
        if self.slots < 1 or self.step_s + self.request_s <= 0:
            raise ValueError(
                f"engine.slots is {self.slots}, engine.step_s {self.step_s} and engine.request_s "
                f"{self.request_s}; allowed: at least a slot, and steps that take time"
            )
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(
                    f"engine.{field.name} is {getattr(self, field.name)!r}; allowed: 0 or more"
                )

    def seconds_per_token(self, running: int) -> float:
        """Of each of so many requests."""
        return self.step_s + running * self.request_s

    def tokens_per_s(self, running: float) -> float:
        """Of all of so many requests together, at most; concave in their number.

        Below one request per engine some engines have none, so it is linear there.
        """
        running = min(running, self.slots)
        return min(running, 1.0) * max(running, 1.0) / self.seconds_per_token_of(max(running, 1.0))

    def seconds_per_token_of(self, running: float) -> float:
        """Of each of so many requests, on average."""
        return self.step_s + running * self.request_s
