"""Defines the faults of a simulation, and says which one is due in a call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from megatron_idempotent.settings import Field, settings

Target = Literal["engine", "policy", "weights", "plane", "prompt"]

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
}
"""The kinds of fault that can happen to each target."""

CALLS: Mapping[str, tuple[str, ...]] = {
    "policy": ("begin", "logprobs", "microbatch", "finish", "abort"),
    "plane": ("put", "get", "clear"),
}
"""The calls in which a fault can happen, by target; faults of other targets name no call."""


@settings(ValueError, "fault.")
class Fault:
    """Describes something that goes wrong in a simulation.

    Example: `Fault(target="policy", kind="raises", call="finish", at_s=100.0, times=2)`.
    """

    target: Target
    """The part to which it happens."""
    kind: str
    """The fault, one of `KINDS[target]`."""
    at_s: float = Field(default=0.0, ge=0)
    """Virtual seconds at which it happens; a fault of a call happens in the first call after."""
    index: int = Field(default=0, ge=0)
    """Number of the engine or of the prompt, from 0; other targets have none."""
    call: str = ""
    """Name of the call in which it happens, for the policy and the data plane; else empty."""
    times: int = Field(default=1, ge=1)
    """Number of calls in a row to which it happens."""
    for_s: float = Field(default=0.0, ge=0)
    """Virtual seconds until an engine is back, or as fast as before; 0 for ever."""
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
        """Describe the fault in a few words, such as `engine 3 dies in stage`."""
        which = f" {self.index}" if self.target in ("engine", "prompt") else ""
        call = f".{self.call}" if self.call else ""
        return f"{self.target}{which}{call} {self.kind}"


class InjectedError(RuntimeError):
    """A simulated call failed because a scenario's fault was due."""


class Faults:
    """Hands out the faults that are due in calls, and records them.

    Example: `faults.due("policy", call="finish")`.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._left = [fault for fault in faults for _ in range(fault.times)]
        self.happened: list[tuple[float, Fault]] = []

    def due(
        self, target: Target, *, call: str = "", index: int = 0, kinds: Iterable[str] | None = None
    ) -> Fault | None:
        """Return the fault that is to happen in this call, if any, and use up one of its times.

        Args:
            target: the part that is called.
            call: the call's name, if faults of the target name one.
            index: number of the engine or prompt, if faults of the target have one.
            kinds: the kinds of fault that can happen here; None for all.
        """
        now = asyncio.get_running_loop().time()
        for fault in self._left:
            if (
                (fault.target, fault.call, fault.index) == (target, call, index)
                and fault.at_s <= now
                and (kinds is None or fault.kind in kinds)
            ):
                self._left.remove(fault)
                self.happened.append((now, fault))
                return fault
        return None


@contextlib.contextmanager
def failing(fault: Fault | None, call: str) -> Iterator[None]:
    """Raise `InjectedError` in place of a call, or after it, as a fault of the call says."""
    if fault is not None and fault.kind == "raises":
        raise InjectedError(f"{call} fails by a fault of the scenario")
    yield
    if fault is not None:
        raise InjectedError(f"{call} was carried out, and then it failed")
