"""Other processes to send weights to, and what is sent."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import torch

from megatron_idempotent.rl.weights import Bucket

_SCRIPT = pathlib.Path(__file__).with_name("transport_peer.py")
#: An interpreter with another Python or torch, to run the same tests across both.
_PYTHON = os.environ.get("MEGATRON_IDEMPOTENT_PEER_PYTHON", sys.executable)
_DEADLINE_S = 120.0


class PeerError(Exception):
    """Describes what a call raised in the other process: its type's name, and its message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Forks:
    """A process that has imported torch, and forks others, for which that costs nothing."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [_PYTHON, str(_SCRIPT), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": str(_SCRIPT.parents[2]),
                    "PYTHONWARNINGS": "default",
                },
            )

    def fork(self, streams: list[int]) -> int:
        """A process with these three streams, in a session of its own; its id."""
        socket.send_fds(self._orders, [b"."], streams)
        return int.from_bytes(self._orders.recv(8), "little")

    def end(self) -> None:
        self._orders.close()
        self._process.wait(_DEADLINE_S)


class PeerProcess:
    """A process that runs `transport_peer.py`, alone in its process group."""

    def __init__(self, forks: Forks) -> None:
        read_in, write_in = os.pipe()
        read_out, write_out = os.pipe()
        read_errors, write_errors = os.pipe()
        theirs = [read_in, write_out, write_errors]
        self.pid = forks.fork(theirs)
        for stream in theirs:
            os.close(stream)
        self._in = os.fdopen(write_in, "w")
        self._out, self._err = os.fdopen(read_out), os.fdopen(read_errors)
        self._lines: queue.Queue[str] = queue.Queue()
        self._errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        for line in self._out:
            self._lines.put(line)
        self._lines.put("")

    def _read_errors(self) -> None:
        self._errors.extend(self._err)

    def tell(self, do: str, **arguments: Any) -> None:
        """Give a command, and do not wait for its answer."""
        self._in.write(json.dumps({"do": do, "with": arguments}) + "\n")
        self._in.flush()

    def answer(self) -> Any:
        line = self._lines.get(timeout=_DEADLINE_S)
        if not line:
            self._threads[1].join(_DEADLINE_S)
            raise AssertionError(f"the other process ended: {''.join(self._errors)}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"], answer["message"])
        return answer["ok"]

    def ask(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return self.answer()

    async def answers(self, do: str, **arguments: Any) -> Any:
        return await asyncio.to_thread(self.ask, do, **arguments)

    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self, *, group: bool = False) -> None:
        """SIGKILL for it, or also for what it has started, such as a resource tracker."""
        (os.killpg if group else os.kill)(self.pid, signal.SIGKILL)
        self._reap()

    def end(self) -> str:
        """Let it end by itself; return what it wrote to its standard error."""
        self._in.close()
        self._reap()
        return "".join(self._errors)

    def _reap(self) -> None:
        until = time.monotonic() + _DEADLINE_S
        while self.alive():
            assert time.monotonic() < until, f"{self.pid} does not end"
            time.sleep(0.002)
        for thread in self._threads:
            thread.join(_DEADLINE_S)
        for pipe in (self._in, self._out, self._err):
            pipe.close()


class Peers:
    """Processes that are started once and used by many tests, up to the one that kills them."""

    def __init__(self) -> None:
        self._forks = Forks()
        self._processes = [PeerProcess(self._forks), PeerProcess(self._forks)]

    def __getitem__(self, place: int) -> PeerProcess:
        if not self._processes[place].alive():
            self._processes[place] = PeerProcess(self._forks)
        return self._processes[place]

    def end(self) -> None:
        for process in self._processes:
            if process.alive():
                process.end()
        self._forks.end()


def every_kind_of_tensor(seed: int = 0) -> dict[str, torch.Tensor]:
    """All types that models have, and all ways in which a tensor can lie in memory."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(33, 17, generator=generator)
    bits = torch.randint(-(2**62), 2**62, (5, 3), generator=generator)
    return {
        "float32": base,
        "bfloat16": base.bfloat16(),
        "float16": base.half(),
        "float8_e4m3fn": base.to(torch.float8_e4m3fn),
        "float8_e5m2": base.to(torch.float8_e5m2),
        "int64": bits,
        "bool": base > 0,
        "not a number": bits.view(torch.float32),  # payloads of NaN have to survive
        "scalar": torch.tensor(3.25, dtype=torch.bfloat16),
        "empty": torch.empty(0, 5),
        "transposed": base.t(),
        "transposed float8": base.to(torch.float8_e4m3fn).t(),
        "every third": base[:, ::3],
        "expanded": base[:1].expand(4, 17),
        "shifted": base.reshape(-1)[3:],
        "tied": base,
        "parameter": torch.nn.Parameter(base.clone()),
        "large": torch.randn(1 << 20, generator=generator),  # more than a grain of a segment
        "odd": torch.arange(7, dtype=torch.uint8),
        "empty behind odd": torch.empty(0, dtype=torch.int64),
    }


def buckets_of(seed: int, count: int = 3) -> list[Bucket]:
    """Buckets of different sizes: one with every kind of tensor, and one without any."""
    generator = torch.Generator().manual_seed(seed)
    buckets = [
        Bucket.of(index, {f"{index}.weight": torch.randn(1000 * (index + 1), generator=generator)})
        for index in range(count - 1)
    ]
    every_kind = Bucket.of(count - 1, every_kind_of_tensor(seed))
    return [*buckets, every_kind, Bucket.of(count, {})]


def filled(index: int, megabytes: int = 1) -> Bucket:
    """Return a bucket of one tensor, whose elements are all its index."""
    return Bucket.of(index, {"w": torch.full((megabytes << 18,), float(index))})
