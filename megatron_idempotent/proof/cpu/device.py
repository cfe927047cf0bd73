"""Emulates the device under `torch.cuda`'s names: number, memory, random numbers, streams, events.

Only `enable()` loads this module. Memory counters are all zero, which is the truth: no byte of
device memory is in use. Streams are of a device that finishes every call before it returns. Calls
that would need a number that does not exist here (free device memory, power, clock), and every
other public name of `torch.cuda` that is not in the table, raise `NotEmulatedError` by their name,
so that a call that is added by a later torch is refused, too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.cuda import graphs, memory, nvtx, profiler, random, streams

from megatron_idempotent.patching.base import PerProcess

from . import table
from .errors import NotEmulatedError

CAPABILITY = (0, 0)
NAME = "megatron_idempotent CPU runtime"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProperties:
    """Emulates the result of `torch.cuda.get_device_properties`; `total_memory` is the host's
    memory.
    """

    name: str = NAME
    #: The major compute capability, 0, so that all kernels that upstream gates on it stay off.
    major: int = CAPABILITY[0]
    minor: int = CAPABILITY[1]
    total_memory: int
    multi_processor_count: int


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


_nothing = _answer(None)


def device_count() -> int:
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def current_device() -> int:
    return _selected.index


def set_device(device: Any) -> None:
    """Select an emulated device by number or name; raise RuntimeError if it does not exist."""
    index = _index(device)
    if index >= device_count():
        raise RuntimeError(
            f"invalid device ordinal {index}: this process sees {device_count()} emulated "
            f"device(s), from LOCAL_WORLD_SIZE; set that to the number of ranks, or use a lower "
            f"ordinal"
        )
    if index >= 0:
        _selected.index = index


def _index(device: Any) -> int:
    if device is None:
        return current_device()
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        return current_device() if device.index is None else device.index
    return int(device)


def exchange_device(device: int) -> int:
    previous = _selected.index
    if device >= 0:
        _selected.index = device
    return previous


def get_device_properties(device: Any = None) -> DeviceProperties:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return DeviceProperties(total_memory=pages, multi_processor_count=os.cpu_count() or 1)


_POOLED = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
_PLAIN = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return a dict with the keys that CUDA's allocator reports, and 0 for each."""
    stats = {
        f"{counter}.{pool}.{moment}": 0
        for counter in _POOLED
        for pool in ("all", "large_pool", "small_pool")
        for moment in ("current", "peak", "allocated", "freed")
    }
    return stats | dict.fromkeys(_PLAIN, 0)


# Random numbers: the CPU generator is the one that fills these tensors.


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    torch.default_generator.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state() for _ in range(device_count())]


def set_rng_state_all(new_states: Any) -> None:
    set_rng_state(list(new_states)[current_device()])


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def seed() -> None:
    torch.default_generator.seed()


def initial_seed() -> int:
    return torch.default_generator.initial_seed()


# Streams and events: all work is always done already.

_ids = itertools.count()


class Event:
    """Emulates `torch.cuda.Event`: `elapsed_time` is measured wall time in milliseconds."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        if interprocess:
            raise NotEmulatedError("torch.cuda.Event(interprocess=True)")
        self.enable_timing = enable_timing
        self._recorded_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._recorded_s = time.perf_counter()

    wait = synchronize = _nothing
    query = _answer(True)

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event's `record` to that of `end_event`.

        Raises RuntimeError, as CUDA does, if either event was not recorded or has no timing.
        """
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("both events must be created with enable_timing=True")
        if self._recorded_s is None or end_event._recorded_s is None:
            raise RuntimeError("both events must be recorded before elapsed_time()")
        return (end_event._recorded_s - self._recorded_s) * 1e3

    def ipc_handle(self) -> bytes:
        raise NotEmulatedError("torch.cuda.Event.ipc_handle")

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Event:
        raise NotEmulatedError("torch.cuda.Event.from_ipc_handle")


class Stream:
    """Emulates `torch.cuda.Stream`: a queue of work that has always completed."""

    def __init__(self, device: Any = None, priority: int = 0, **_kwargs: Any) -> None:
        self.device = device
        self.priority = priority
        self.stream_id = self.cuda_stream = next(_ids)
        self._outer: list[Stream] = []

    wait_event = wait_stream = synchronize = _nothing
    query, is_capturing = _answer(True), _answer(False)
    priority_range = staticmethod(_answer((0, 0)))

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._outer.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *_exc: object) -> None:
        set_stream(self._outer.pop())


_default = Stream()


class _Selected(PerProcess, threading.local):
    index: int = 0
    stream: Stream = _default


_selected = _Selected(__name__, "_selected")


class StreamContext:
    """A context manager that makes `stream` the current emulated stream within its block; None
    changes nothing.
    """

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self._outer = _selected.stream
        set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        set_stream(self._outer)


def current_stream(device: Any = None) -> Stream:
    return _selected.stream


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _selected.stream = stream


_nvtx_depth = 0


def range_push(msg: str) -> int:
    """Open an emulated NVTX range, and return its depth of nesting, counted from 0."""
    global _nvtx_depth
    _nvtx_depth += 1
    return _nvtx_depth - 1


def range_pop() -> int:
    global _nvtx_depth
    _nvtx_depth -= 1
    return _nvtx_depth


@contextlib.contextmanager
def nvtx_range(msg: str, *_args: Any, **_kwargs: Any) -> Iterator[None]:
    range_push(msg)
    try:
        yield
    finally:
        range_pop()


ANSWERS: dict[str, Any] = {
    name: answer
    for names, answer in (
        (table.TRUE, _answer(True)),
        (table.FALSE, _answer(False)),
        (table.NOTHING, _nothing),
        (table.ZERO, _answer(0)),
    )
    for name in table.short(names)
}
ANSWERS |= {
    answer.__name__: answer
    for answer in (
        *(device_count, current_device, set_device, get_device_properties, memory_stats),
        *(Stream, Event, StreamContext, current_stream, set_stream),
        *(get_rng_state, set_rng_state, get_rng_state_all, set_rng_state_all),
        *(manual_seed, seed, initial_seed),
    )
}
ANSWERS |= {
    "_exchange_device": exchange_device,
    "_maybe_exchange_device": exchange_device,
    "get_device_name": _answer(NAME),
    "get_device_capability": _answer(CAPABILITY),
    "get_arch_list": list,
    "stream": StreamContext,
    "default_stream": _answer(_default),
    "manual_seed_all": manual_seed,
    "seed_all": seed,
}
NVTX_ANSWERS: dict[str, Any] = {
    "range_push": range_push,
    "range_pop": range_pop,
    "range": nvtx_range,
    "mark": _nothing,
}
#: torch's optimizers ask these about graph capture as soon as torch.cuda says it is available.
ACCELERATOR_ANSWERS: dict[str, Any] = {
    name: ANSWERS[name.removesuffix("_index")] for name in table.short(table.ACCELERATOR)
}
OTHER_SEED_ANSWERS = dict.fromkeys(table.short(table.OTHER_SEEDS), _nothing)

#: Private or nested names that Megatron calls and that would otherwise slip through.
_REFUSED_BY_NAME = (
    "torch.cuda._sleep",
    "torch.cuda.memory._record_memory_history",
    "torch.cuda.memory._snapshot",
    "torch.cuda.memory._dump_snapshot",
    "torch.cuda.profiler.start",
    "torch.cuda.profiler.stop",
    "torch.cuda.nvtx.range_start",
    "torch.cuda.nvtx.range_end",
)
#: Public names that stay torch's own, as its storages do: exceptions, constants, and `device`,
#: which acts through `_exchange_device`.
_LEFT_ALONE = {
    *("CudaError", "DeferredCudaCallError", "cudaStatus", "check_error", "device", "device_of")
}
#: `torch.cuda.f` is often defined in one of these and called from there as well.
_SUBMODULES = (graphs, memory, nvtx, profiler, random, streams)


def refused_names() -> list[str]:
    """Return the names whose calls raise `NotEmulatedError`, e.g. "torch.cuda.CUDAGraph"."""
    emulated = table.emulated_names()
    public = [
        f"torch.cuda.{name}"
        for name in torch.cuda.__all__
        if f"torch.cuda.{name}" not in emulated
        and name not in _LEFT_ALONE
        and not name.endswith("Storage")
        and callable(getattr(torch.cuda, name, None))
    ]
    return [*public, *(name for name in _REFUSED_BY_NAME if _lookup(name) is not None)]


class _Generators:
    """Stands in for `torch.cuda.default_generators`: the CPU generator at every index."""

    def __len__(self) -> int:
        return device_count()

    def __getitem__(self, index: int) -> torch.Generator:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return torch.default_generator


def replacements() -> list[tuple[Any, str, Any]]:
    entries: list[tuple[Any, str, Any]] = []
    for owner, answers in (
        (torch.cuda, ANSWERS),
        (torch.cuda.nvtx, NVTX_ANSWERS),
        (getattr(torch, "accelerator", None), ACCELERATOR_ANSWERS),  # torch 2.6 on
        (torch.mtia, OTHER_SEED_ANSWERS),
        (torch.xpu, OTHER_SEED_ANSWERS),
    ):
        for name, answer in answers.items():
            original = getattr(owner, name, None)
            if original is None:
                continue
            entries.append((owner, name, answer))
            entries += _elsewhere(original, answer, owner)
    entries.append((torch.cuda, "default_generators", _Generators()))
    for name in refused_names():
        original, refusal = _lookup(name), _refuse(name)
        if isinstance(original, type):
            # The class stays: modules subclass it and annotate with it while they are imported.
            entries.append(
                (original, "__new__" if "__new__" in vars(original) else "__init__", refusal)
            )
            continue
        owner, attribute = _split(name)
        entries += [(owner, attribute, refusal), *_elsewhere(original, refusal, owner)]
    return entries


def _elsewhere(original: Any, replacement: Any, owner: Any) -> list[tuple[Any, str, Any]]:
    """Return (module, name, replacement) for each other name of the object `original`: those that
    torch.cuda and its submodules, except the module `owner`, bind to it.
    """
    return [
        (module, name, replacement)
        for module in (torch.cuda, *_SUBMODULES)
        if module is not owner
        for name, value in vars(module).items()
        if value is original
    ]


def _refuse(name: str) -> Any:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotEmulatedError(name)

    refuse.__name__ = name.rsplit(".", 1)[1]
    return refuse


def _split(name: str) -> tuple[Any, str]:
    *path, attribute = name.split(".")[1:]
    owner: Any = torch
    for part in path:
        owner = getattr(owner, part)
    return owner, attribute


def _lookup(name: str) -> Any:
    owner, attribute = _split(name)
    return getattr(owner, attribute, None)
