"""Defines the errors of the CPU runtime and its ranks, without importing torch."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any


class NotEmulatedError(RuntimeError):
    """The CPU runtime does not answer a call, because any answer would be wrong."""

    def __init__(self, call: str) -> None:
        super().__init__(
            f"{call} is not emulated by megatron_idempotent.proof.cpu: it needs a CUDA device. "
            f"Turn off the Megatron option that asks for it, or run it on a GPU without "
            f"cpu.enable(); docs/cpu-runtime.md lists what is emulated."
        )
        self.call = call

    def __reduce__(self) -> tuple[type[NotEmulatedError], tuple[str]]:
        # The default rebuilds from the message, which would be wrapped a second time.
        return type(self), (self.call,)


class NoDeviceError(RuntimeError):
    """Ranks on CUDA are asked for, and there is no GPU that they could use."""


class PlacementError(RuntimeError):
    """An operation would fail on a GPU, because its tensors are not where it needs them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """Says why one rank failed.

    Example: `RankFailure(rank=1, exception_type="ValueError", message="bad", traceback="…")`.
    """

    rank: int
    #: The exception's class name, with its module unless built in; "" if the process died.
    exception_type: str
    message: str
    #: The traceback as text, or the Python stacks of a rank that was ended while it ran.
    traceback: str
    #: The exit code if the process died by itself, negative for a signal; None otherwise.
    exit_code: int | None = None

    def __str__(self) -> str:
        if self.exit_code is not None:
            head = f"rank {self.rank} died with {describe_exit(self.exit_code)}"
        else:
            head = f"rank {self.rank}: {self.exception_type}: {self.message}"
        return f"{head}\n{self.traceback}".rstrip()


class RankError(RuntimeError):
    """One or more ranks raised or died; the first to fail comes first.

    `rank`, `exception_type`, `message` and `traceback` are those of the first failure;
    `failures` has all of them.
    """

    def __init__(self, failures: list[RankFailure], still_running: dict[int, str]) -> None:
        self.failures = failures
        self.still_running = still_running
        first = failures[0]
        self.rank = first.rank
        self.exception_type = first.exception_type
        self.message = first.message
        self.traceback = first.traceback
        self.exit_code = first.exit_code
        parts = [str(failure) for failure in failures]
        parts += [
            f"rank {rank} was still running and has been ended; its stacks:\n{stacks}"
            for rank, stacks in still_running.items()
        ]
        super().__init__("\n\n".join(parts))


class RankTimeout(TimeoutError):
    """The ranks missed their deadline and were ended.

    `stacks` has the Python stacks of each, and `results` what those returned that had finished.
    """

    def __init__(self, timeout_s: float, stacks: dict[int, str], results: dict[int, Any]) -> None:
        self.timeout_s = timeout_s
        self.stacks = stacks
        self.results = results
        self.finished = finished = sorted(results)
        parts = [f"the ranks did not finish within {timeout_s:g} s and have been ended"]
        for rank, text in sorted(stacks.items()):
            state = "had finished and waited for the others" if rank in finished else "was in"
            parts.append(f"rank {rank} {state}:\n{text}")
        super().__init__("\n\n".join(parts))


def describe_exit(exit_code: int) -> str:
    """Describe a process's exit code in words: `describe_exit(-9) == "signal SIGKILL"`."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    return f"signal {signal.Signals(-exit_code).name}"
