"""The faults of a simulation, and their times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from megatron_idempotent.settings import Field, settings

Target = Literal["engine", "policy", "weights", "plane", "prompt", "logger"]

KINDS: Mapping[str, tuple[str, ...]] = {
    "engine": (
        "dies",
        "dies in stage",
        "dies in commit",
        "stays dirty",
        "hangs",
        "slow",
        "loses a bucket",
    ),
    "policy": ("raises", "done, then raises", "ranks lost", "hangs"),
    "weights": ("raises",),
    "plane": ("raises", "done, then raises"),
    "prompt": ("poisoned", "fails", "hangs"),
    "logger": ("raises",),
}
"""The faults that can happen to each target."""

CALLS: Mapping[str, tuple[str, ...]] = {
    "policy": ("begin", "logprobs", "microbatch", "finish", "abort"),
    "plane": ("put", "get", "clear"),
}
"""The calls that a fault of a target happens in."""


@settings(ValueError, "fault.")
class Fault:
    """Something that goes wrong.

    Example: `Fault(target="policy", kind="raises", call="finish", at_s=100.0, times=2)`.
    """

    target: Target
    kind: str
    at_s: float = Field(default=0.0, ge=0)
    """Virtual time; faults of calls happen in the first call after it."""
    index: int = Field(default=0, ge=0)
    """Number of the engine, or of the prompt."""
    call: str = ""
    """Name of the policy's call, or of the data plane's."""
    times: int = Field(default=1, ge=1)
    """Calls, one after the other."""
    for_s: float = Field(default=0.0, ge=0)
    """Seconds until an engine is back, or as fast as before; 0 for ever."""
    factor: float = Field(default=0.1, gt=0, lt=1)
    """The speed of a slow engine, as a share of the usual one."""

    def __post_init__(self) -> None:
        kinds, calls = KINDS[self.target], CALLS.get(self.target, ("",))
        if self.kind not in kinds:
            raise ValueError(
                f"fault.kind is {self.kind!r}; allowed for {self.target}: {', '.join(kinds)}"
            )
        if self.call not in calls:
            raise ValueError(
                f"fault.call is {self.call!r}; allowed for {self.target}: "
                f"{', '.join(map(repr, calls))}"
            )

    def described(self) -> str:
        """Describes the fault: `engine 3 dies in stage`."""
        which = f" {self.index}" if self.target in ("engine", "prompt") else ""
        call = f".{self.call}" if self.call else ""
        return f"{self.target}{which}{call} {self.kind}"


class InjectedError(RuntimeError):
    """Raised where a fault was asked for."""


class Faults:
    """The faults that happen in calls. Example: `faults.due("policy", now, call="finish")`."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._left = [[fault, fault.times] for fault in faults]
        self.happened: list[tuple[float, Fault]] = []

    def due(
        self,
        target: Target,
        now: float,
        *,
        call: str = "",
        index: int = 0,
        kinds: Iterable[str] | None = None,
    ) -> Fault | None:
        """Return the fault that this call is to have, if any; it counts as one of its times."""
        for entry in self._left:
            fault, times = entry
            assert isinstance(fault, Fault)
            assert isinstance(times, int)
            if (
                times
                and (fault.target, fault.call, fault.index) == (target, call, index)
                and fault.at_s <= now
                and (kinds is None or fault.kind in kinds)
            ):
                entry[1] = times - 1
                self.happened.append((now, fault))
                return fault
        return None
