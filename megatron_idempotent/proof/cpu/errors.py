"""Defines the errors of the CPU runtime and its ranks, without importing torch."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Any


class NotEmulatedError(RuntimeError):
    """Raised by a call that the CPU runtime does not emulate, because any result would be wrong."""

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
    """Raised if ranks on CUDA are asked for, and this machine has no GPU that they can use."""


class LauncherLost(RuntimeError):
    """Raised when the launcher, the process that forks the ranks, has ended during a call, and with
    it all ranks.
    """


class PlacementError(RuntimeError):
    """Raised for an operation that would fail on a GPU, because a tensor is in the wrong memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """Describes why one rank failed: its exception and traceback, or its exit code if it died.

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
        head = self._death or f"rank {self.rank}: {self.exception_type}: {self._first_line}"
        return f"{head}\n{self.traceback}".rstrip()

    @property
    def _death(self) -> str:
        code = self.exit_code
        return "" if code is None else f"rank {self.rank} died with {describe_exit(code)}"

    @property
    def _first_line(self) -> str:
        return self.message.partition("\n")[0]

    @property
    def of_a_peer(self) -> bool:
        """True if the failure reports only that another rank has left."""
        kind = self.exception_type.rpartition(".")[2]
        return kind.startswith("Dist") or "/gloo/" in self.message

    @property
    def folded(self) -> str:
        """The failure in one line, with the file and line in the caller's code."""
        # gloo's messages begin with its own file, and end with advice: both are cut off.
        message = re.sub(r"^\[[^]]*/gloo/[^]]*\] ", "", self._first_line).partition(". ")[0]
        head = self._death or f"rank {self.rank}: {self.exception_type}: {message}"
        return f"{head}{_location(self.traceback)}"


class RankError(RuntimeError):
    """Raised if one or more ranks raised or died. The message begins with a rank that failed by
    itself; ranks that failed because another one had left come last.

    `rank`, `exception_type`, `message` and `traceback` are those of the first failure;
    `failures` has all of them. The text has a line for each rank that failed because another one
    left, and for each that was still running; `full` has their tracebacks and stacks, too.
    """

    def __init__(self, failures: list[RankFailure], still_running: dict[int, str]) -> None:
        # If a rank dies, its peers may report first, before its death is noticed.
        self.failures = failures = sorted(failures, key=lambda failure: failure.of_a_peer)
        self.still_running = still_running
        first = failures[0]
        self.rank = first.rank
        self.exception_type = first.exception_type
        self.message = first.message
        self.traceback = first.traceback
        self.exit_code = first.exit_code
        detailed = [
            failure
            for failure in failures[1:]
            if not (failure.of_a_peer or (failure.traceback == first.traceback != ""))
        ]
        parts = [str(failure) for failure in (first, *detailed)]
        lines = [failure.folded for failure in failures[1:] if failure not in detailed]
        lines += [f"{_ENDED.format(rank)}{_location(text)}" for rank, text in still_running.items()]
        if lines:
            lines.append("(a line each: `full` of this error has all of it)")
            parts.append("\n".join(lines))
        super().__init__("\n\n".join(parts))

    @property
    def full(self) -> str:
        """The tracebacks of all ranks that failed, and the stacks of those that were running."""
        parts = [str(failure) for failure in self.failures]
        parts += [
            f"{_ENDED.format(rank)}; its stacks:\n{stacks}"
            for rank, stacks in self.still_running.items()
        ]
        return "\n\n".join(parts)


class RankTimeout(TimeoutError):
    """Raised if the ranks have not all finished by the deadline; all ranks have been killed by
    then.

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


_ENDED = "rank {} was still running and has been ended"


def _location(stack: str) -> str:
    """Return " at file:line" of a stack's innermost frame outside of site-packages, or ""."""
    newest_first = "most recent call first" in stack
    locations = re.findall(r'File "(.+)", line (\d+)', stack)
    own_locations = [(file, line) for file, line in locations if "site-packages" not in file]
    if not own_locations:
        return ""
    file, line = own_locations[0 if newest_first else -1]
    return f" at {file}:{line}"


def describe_exit(exit_code: int) -> str:
    """Describe a process's exit code in words: `describe_exit(-9) == "signal SIGKILL"`."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    return f"signal {signal.Signals(-exit_code).name}"
