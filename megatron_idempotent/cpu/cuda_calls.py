"""`torch.cuda`'s names and the functions that answer them. Imports torch."""

from __future__ import annotations

from typing import Any

import torch

from megatron_idempotent.cpu import device, refusals, streams

ANSWERS: dict[str, Any] = {
    "is_available": device.yes,
    "is_initialized": device.yes,
    "is_bf16_supported": device.yes,
    "is_tf32_supported": device.no,
    "is_current_stream_capturing": device.no,
    "init": device.nothing,
    "_lazy_init": device.nothing,
    "synchronize": device.nothing,
    "empty_cache": device.nothing,
    "reset_peak_memory_stats": device.nothing,
    "reset_accumulated_memory_stats": device.nothing,
    "reset_max_memory_allocated": device.nothing,
    "reset_max_memory_cached": device.nothing,
    "device_count": device.device_count,
    "current_device": device.current_device,
    "set_device": device.set_device,
    "_exchange_device": device.exchange_device,
    "_maybe_exchange_device": device.exchange_device,
    "get_device_properties": device.get_device_properties,
    "get_device_name": device.get_device_name,
    "get_device_capability": device.get_device_capability,
    "get_arch_list": device.none_of_them,
    "Stream": streams.Stream,
    "Event": streams.Event,
    "stream": streams.stream,
    "StreamContext": streams.StreamContext,
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "set_stream": streams.set_stream,
    "memory_allocated": device.no_bytes,
    "max_memory_allocated": device.no_bytes,
    "memory_reserved": device.no_bytes,
    "max_memory_reserved": device.no_bytes,
    "memory_cached": device.no_bytes,
    "max_memory_cached": device.no_bytes,
    "device_memory_used": device.no_bytes,
    "memory_stats": device.memory_stats,
    "get_rng_state": device.get_rng_state,
    "set_rng_state": device.set_rng_state,
    "get_rng_state_all": device.get_rng_state_all,
    "set_rng_state_all": device.set_rng_state_all,
    "manual_seed": device.manual_seed,
    "manual_seed_all": device.manual_seed,
    "seed": device.seed,
    "seed_all": device.seed,
    "initial_seed": device.initial_seed,
}

NVTX_ANSWERS: dict[str, Any] = {
    "range_push": device.range_push,
    "range_pop": device.range_pop,
    "range": device.nvtx_range,
    "mark": device.nothing,
}


#: torch's optimizers ask these about graph capture as soon as torch.cuda says it is available.
ACCELERATOR_ANSWERS: dict[str, Any] = {
    "is_available": device.yes,
    "device_count": device.device_count,
    "current_device_index": device.current_device,
    "set_device_index": device.set_device,
    "current_stream": streams.current_stream,
    "set_stream": streams.set_stream,
    "synchronize": device.nothing,
}


class _Generators:
    """`torch.cuda.default_generators`: the CPU generator under every index."""

    def __len__(self) -> int:
        return device.device_count()

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
