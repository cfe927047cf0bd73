"""The cost of an engine's work, in virtual seconds."""

from __future__ import annotations

from megatron_idempotent.settings import Field, settings


@settings(ValueError, "engine.")
class EngineCosts:
    """The cost of an engine's work.

    A decode step of a batch of n requests takes `step_s + n * request_s` and brings each of them
    one token: memory-bound for small batches, and never more than 1 / request_s tokens a second.
    """

    slots: int = Field(default=64, ge=1)
    """Requests that run at once; more wait in the engine."""
    step_s: float = Field(default=0.02, ge=0)
    request_s: float = Field(default=0.0002, ge=0)
    prompt_tokens: float = Field(default=0.0, ge=0)
    """Tokens' worth of time before the first token of a response, or of what is left of it."""
    bucket_s: float = Field(default=0.5, ge=0)
    """Seconds to take one bucket of weights; the engine serves meanwhile."""
    pause_s: float = Field(default=0.02, ge=0)
    commit_s: float = Field(default=0.5, ge=0)
    resume_s: float = Field(default=0.01, ge=0)

    def __post_init__(self) -> None:
        if self.step_s + self.request_s <= 0:
            raise ValueError(
                f"engine.step_s is {self.step_s:g} and engine.request_s {self.request_s:g}; "
                "allowed: steps that take time"
            )

    def seconds_per_token(self, running: int) -> float:
        """Returns the seconds per token of each of `running` requests."""
        return self.step_s + running * self.request_s

    def tokens_per_s(self, running: float) -> float:
        """Returns the most tokens per second of all `running` requests; concave in their number.

        Below one request per engine some engines have none, so it is linear there.
        """
        running = min(running, self.slots)
        return min(running, 1.0) * max(running, 1.0) / self.seconds_per_token_of(max(running, 1.0))

    def seconds_per_token_of(self, running: float) -> float:
        """Returns the mean seconds per token of each of `running` requests."""
        return self.step_s + running * self.request_s
