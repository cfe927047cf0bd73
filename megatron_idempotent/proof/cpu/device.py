"""Answers for the device: its number, name, memory and random numbers, by `torch.cuda`'s names.

Only `enable()` loads this module. Memory counters are all zero, which is the truth: no byte of
device memory is in use. `refusals` refuses calls that would need a number that does not exist here
(free device memory, power, clock).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_idempotent.patching.base import PerProcess

from . import refusals, streams

CAPABILITY = (0, 0)
NAME = "megatron_idempotent CPU runtime"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProperties:
    """Answers `torch.cuda.get_device_properties`; `total_memory` is the host's, in bytes."""

    name: str = NAME
    #: The major compute capability, 0, so that all kernels that upstream gates on it stay off.
    major: int = CAPABILITY[0]
    minor: int = CAPABILITY[1]
    total_memory: int
    multi_processor_count: int


class _Selected(PerProcess, threading.local):
    index: int = 0


_selected = _Selected(__name__, "_selected")


def device_count() -> int:
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def current_device() -> int:
    return _selected.index


def set_device(device: Any) -> None:
    """Select a device by number or name; raise RuntimeError for one that does not exist."""
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
    before = _selected.index
    if device >= 0:
        _selected.index = device
    return before


def get_device_properties(device: Any = None) -> DeviceProperties:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return DeviceProperties(total_memory=pages, multi_processor_count=os.cpu_count() or 1)


def get_device_name(device: Any = None) -> str:
    return NAME


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return CAPABILITY


# Memory ------------------------------------------------------------------------------------

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
    """Return the keys that CUDA's allocator reports, each 0."""
    stats = {
        f"{what}.{pool}.{when}": 0
        for what in _POOLED
        for pool in ("all", "large_pool", "small_pool")
        for when in ("current", "peak", "allocated", "freed")
    }
    return stats | dict.fromkeys(_PLAIN, 0)


def no_bytes(device: Any = None) -> int:
    return 0


# Random numbers: the CPU generator is the one that fills these tensors ----------------------


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


# Answers that are the same every time -------------------------------------------------------


def return_true(*_args: Any, **_kwargs: Any) -> bool:
    return True


def return_false(*_args: Any, **_kwargs: Any) -> bool:
    return False


def no_op(*_args: Any, **_kwargs: Any) -> None:
    return None


def return_empty_list() -> list[str]:
    return []


_nvtx_depth = 0


def range_push(msg: str) -> int:
    """Open a range, and return its depth, from 0, as NVTX counts."""
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
    "is_available": return_true,
    "is_initialized": return_true,
    "is_bf16_supported": return_true,
    "is_tf32_supported": return_false,
    "is_current_stream_capturing": return_false,
    "init": no_op,
    "_lazy_init": no_op,
    "synchronize": no_op,
    "empty_cache": no_op,
    "reset_peak_memory_stats": no_op,
    "reset_accumulated_memory_stats": no_op,
    "reset_max_memory_allocated": no_op,
    "reset_max_memory_cached": no_op,
    "device_count": device_count,
    "current_device": current_device,
    "set_device": set_device,
    "_exchange_device": exchange_device,
    "_maybe_exchange_device": exchange_device,
    "get_device_properties": get_device_properties,
    "get_device_name": get_device_name,
    "get_device_capability": get_device_capability,
    "get_arch_list": return_empty_list,
    "Stream": streams.Stream,
    "Event": streams.Event,
    "stream": streams.stream,
    "StreamContext": streams.StreamContext,
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "set_stream": streams.set_stream,
    "memory_allocated": no_bytes,
    "max_memory_allocated": no_bytes,
    "memory_reserved": no_bytes,
    "max_memory_reserved": no_bytes,
    "memory_cached": no_bytes,
    "max_memory_cached": no_bytes,
    "device_memory_used": no_bytes,
    "memory_stats": memory_stats,
    "get_rng_state": get_rng_state,
    "set_rng_state": set_rng_state,
    "get_rng_state_all": get_rng_state_all,
    "set_rng_state_all": set_rng_state_all,
    "manual_seed": manual_seed,
    "manual_seed_all": manual_seed,
    "seed": seed,
    "seed_all": seed,
    "initial_seed": initial_seed,
}

NVTX_ANSWERS: dict[str, Any] = {
    "range_push": range_push,
    "range_pop": range_pop,
    "range": nvtx_range,
    "mark": no_op,
}


#: torch's optimizers ask these about graph capture as soon as torch.cuda says it is available.
ACCELERATOR_ANSWERS: dict[str, Any] = {
    "is_available": return_true,
    "device_count": device_count,
    "current_device_index": current_device,
    "set_device_index": set_device,
    "current_stream": streams.current_stream,
    "set_stream": streams.set_stream,
    "synchronize": no_op,
}


class _Generators:
    """Stands in for `torch.cuda.default_generators`: the CPU generator at every index."""

    def __len__(self) -> int:
        return device_count()

    def __getitem__(self, index: int) -> torch.Generator:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return torch.default_generator


def replacements() -> list[tuple[Any, str, Any]]:
    found: list[tuple[Any, str, Any]] = []
    for owner, answers in (
        (torch.cuda, ANSWERS),
        (torch.cuda.nvtx, NVTX_ANSWERS),
        (getattr(torch, "accelerator", None), ACCELERATOR_ANSWERS),  # torch 2.6 on
    ):
        for name, answer in answers.items():
            original = getattr(owner, name, None)
            if original is None:
                continue
            found.append((owner, name, answer))
            found += refusals.elsewhere(original, answer, owner)
    found.append((torch.cuda, "default_generators", _Generators()))
    return found
