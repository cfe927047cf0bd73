"""The worker of the contract's tests. Ranks import this; it must not import pytest."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FACTORY = "contract_worker:make"
FAILING_FACTORY = "contract_worker:fail_on_rank_1"


def make(argument: Any) -> Worker:
    """A worker as `WorkerSpec(factory=FACTORY, argument=…)` asks for."""
    return Worker(argument)


def fail_on_rank_1(argument: Any) -> Worker:
    """A factory that raises on one rank."""
    if dist.get_rank() == 1:
        raise ValueError(f"no worker for {argument!r}")
    return Worker(argument)


class Unreadable:
    """Pickles, and raises where it is read."""

    def __reduce__(self) -> Any:
        return _unreadable, ()


def _unreadable() -> None:
    raise ValueError("this cannot be read")


class Worker:
    """Methods that the contract calls, and a list of what was called."""

    def __init__(self, argument: Any) -> None:
        self.argument = argument
        self.seen: list[Any] = []

    def describe(self) -> tuple[int, int, int, Any]:
        """Rank, size of the default group, process id, the spec's argument."""
        return dist.get_rank(), dist.get_world_size(), os.getpid(), self.argument

    def note(self, what: Any, own: Any = None) -> list[Any]:
        """Remember and return all that was noted."""
        self.seen.append(what if own is None else (what, own))
        return list(self.seen)

    def echo(self, *values: Any) -> tuple[Any, ...]:
        """Return what it got."""
        return values

    def add_up(self, value: float) -> float:
        """`value` + rank, summed over all ranks."""
        total = torch.tensor([value + dist.get_rank()])
        dist.all_reduce(total)
        return float(total)

    def fail(self, ranks: list[int]) -> int:
        """Raise on these ranks."""
        if dist.get_rank() in ranks:
            raise LookupError(f"rank {dist.get_rank()} was asked to fail")
        return dist.get_rank()

    def wait_for(self, path: Path, what: Any) -> list[Any]:
        """Return once there is such a file."""
        Path(f"{path}.rank-{dist.get_rank()}").touch()
        until = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < until, f"no {path}"
            time.sleep(0.005)
        return self.note(what)

    def die(self, ranks: list[int]) -> None:
        """These ranks are killed; the others return."""
        if dist.get_rank() in ranks:
            os.kill(os.getpid(), signal.SIGKILL)

    def die_in_collective(self, ranks: list[int]) -> None:
        """These ranks are killed while the others wait for them."""
        self.die(ranks)
        dist.barrier()

    def exit_at_once(self, ranks: list[int], code: int) -> None:
        """These ranks end without a word, as a crash in C does."""
        if dist.get_rank() in ranks:
            os._exit(code)

    def say(self, text: str) -> None:
        """Print, from C too."""
        os.write(1, f"{text}\n".encode())

    def hang(self) -> None:
        """Sleep for longer than any test."""
        time.sleep(600)

    def give_up(self) -> None:
        """End the process from the method, as a library may do."""
        raise SystemExit(3)

    def a_lambda(self) -> Any:
        """Cannot be pickled."""
        return lambda: None

    def unreadable(self) -> Any:
        """Cannot be unpickled."""
        return Unreadable()

    def seeded(self, seed: int, elements: int) -> torch.Tensor:
        """Random numbers, the same ones anywhere."""
        return torch.randn(elements, generator=torch.Generator().manual_seed(seed))

    def view(self, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A row and a column of a square of float32, as views."""
        square = torch.arange(elements * elements, dtype=torch.float32).reshape(elements, elements)
        return square[1], square[:, 1]
