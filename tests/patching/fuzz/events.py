"""Calls as they look from outside, and the comparison of stock with patched ones."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import io
import os
import pickle
import re
import select
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

State = Callable[[], "dict[str, Any]"]
#: Of an object in its `repr`: another one in each process.
_ADDRESS = re.compile(r"0x[0-9a-f]+")


class Event(NamedTuple):
    """One call of the function."""

    call: str
    raised: str
    """Type and message; empty where it returned or left the process by `sys.exit`."""
    seen: dict[str, Any]
    """Returned value of the call, and what it changed."""
    before: dict[str, Any]
    """State that a patch may put back, as it was before the call."""
    after: dict[str, Any]


def nothing() -> dict[str, Any]:
    """No state."""
    return {}


def call(name: str, function: Callable[[], Any], state: State, undone: State = nothing) -> Event:
    """Call it, and drive what it returned where that is a coroutine or a generator.

    Args:
        state: what is to be seen afterwards.
        undone: what a patch may put back.
    """
    before, raised, seen, after = undone(), "", {}, {}
    try:
        returned = function()
        if inspect.iscoroutine(returned):
            returned = asyncio.new_event_loop().run_until_complete(returned)
        elif inspect.isgenerator(returned):
            returned = _exhausted(returned)
        seen = {"result": described(returned), **state()}
        after = undone()
    except SystemExit as error:
        seen = {"result": f"exit {error.code}", **state()}
        after = undone()
    except Exception as error:  # noqa: BLE001 - what it raises is what we compare
        raised = f"{type(error).__name__}: {error}"[:300]
    return Event(name, raised, seen, before, after)


def compare(stock: Sequence[Event], patched: Sequence[Event], died: str) -> tuple[str, int]:
    """Return how they differ in a call that works on stock, and the program's number of such
    calls.

    Args:
        died: how a patched process ended, if not well.
    """
    for index, ours in enumerate(stock):
        if ours.raised:
            return "", index  # what comes after an error has no right answer
        if index >= len(patched):
            return f"{ours.call}: stock works, patched: {died or 'no answer'}", index + 1
        theirs = patched[index]
        if theirs.raised:
            return f"{ours.call}: stock works, patched raises {theirs.raised}", index + 1
        for name, value in ours.seen.items():
            if theirs.seen.get(name) != value:
                return f"{ours.call}: {name}: {_both(value, theirs.seen.get(name))}", index + 1
        for name, value in ours.after.items():
            if theirs.after[name] not in (value, theirs.before[name]):
                return f"{ours.call}: {name}: {_both(value, theirs.after[name])}", index + 1
    return "", len(stock)


def _both(stock: Any, patched: Any) -> str:
    return f"{stock!r:.200} on stock, {patched!r:.200} patched"


def _exhausted(generator: Any) -> Any:
    try:
        while True:
            next(generator)
    except StopIteration as stop:
        return stop.value


def described(value: Any) -> Any:
    """Something that can be compared between processes."""
    import torch

    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), digest(value))
    if isinstance(value, Mapping):
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [described(item) for item in value])
    if isinstance(value, str):
        return _ADDRESS.sub("0x...", value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    owner = getattr(value, "__self__", None)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return name if owner is None else f"{name} of a {type(owner).__name__}"


def digest(tensor: Any) -> str:
    """Twelve hexadecimal digits for the tensor's bits."""
    import torch

    flat = tensor.detach().contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


class Pipe:
    """Carries events from a child that may die at any time to its parent, which takes the last
    ones."""

    def __init__(self) -> None:
        self.receive, self.send = os.pipe()

    def say(self, what: Any) -> None:
        """Send from the child."""
        payload = pickle.dumps(what)
        message = len(payload).to_bytes(8, "little") + payload
        while message:
            message = message[os.write(self.send, message) :]

    def last(self, otherwise: Any, child: int) -> Any:
        """Read in the parent, until the child, whose pid this is, ends or closes its end.

        A process that the child leaves, as the server of a multiprocessing manager, may hold the
        pipe open for ever.
        """
        os.close(self.send)
        ended = os.pidfd_open(child)  # readable once it has ended
        data = bytearray()
        # After its end what it has sent is still to be read.
        while self.receive in select.select([self.receive, ended], [], [])[0]:
            if not (chunk := os.read(self.receive, 1 << 16)):
                break
            data += chunk
        os.close(self.receive)
        os.close(ended)
        stream = io.BytesIO(data)
        for payload in self._payloads(stream):
            otherwise = pickle.loads(payload)
        return otherwise

    @staticmethod
    def _payloads(stream: io.BytesIO) -> Iterator[bytes]:
        while head := stream.read(8):
            size = int.from_bytes(head, "little")
            payload = stream.read(size)
            if len(payload) == size:
                yield payload
