"""Puts tensors on the CPU for every spelling of "a CUDA device".

Imports torch; loaded by `enable()` only. Only the functions that can be given a device are
replaced, in the namespace where callers look them up. A `TorchFunctionMode` would also catch
calls made through early-bound names, at the price of a detour around *every* torch call
(benchmarks/cpu_overhead.py has the numbers); Megatron binds none of these names early.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import DeviceContext, _device_constructors

from megatron_idempotent.cpu.errors import NotEmulatedError

CPU = torch.device("cpu")

FACTORIES = (
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "sparse_coo_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
    "bartlett_window",
    "blackman_window",
    "hamming_window",
    "hann_window",
    "kaiser_window",
)
NEW_METHODS = (
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_tensor",
    "new_zeros",
)
TENSOR_TYPES = (
    "BFloat16Tensor",
    "BoolTensor",
    "ByteTensor",
    "CharTensor",
    "DoubleTensor",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
    "ShortTensor",
)


def on_cpu(device: Any) -> Any:
    """The CPU for "cuda", "cuda:1", torch.device("cuda") and bare indices; others unchanged."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return CPU if device.split(":")[0] == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


def placed(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original` with its `device` argument on the CPU and without pinning."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if "device" in kwargs:
                kwargs["device"] = on_cpu(kwargs["device"])
            # Pinning is a property of the device driver; all of this memory is host memory.
            if "pin_memory" in kwargs:
                kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return call


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and not isinstance(args[0], (torch.dtype, torch.Tensor)):
            args = (on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            # Megatron's optimizers sort parameters by this name and refuse any other.
            return original(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original(self, dtype, *args, **kwargs)

    return type_


def _cuda(self: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return self


def _pin_memory(self: torch.Tensor, _device: Any = None) -> torch.Tensor:
    return self


def _record_stream(_self: torch.Tensor, _stream: Any) -> None:
    # Streams are synchronous here, so no later work can outlive the tensor.
    return None


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(f, on_cpu(map_location), *args, **kwargs)

    return load


def _device_context(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: DeviceContext, device: Any) -> None:
        original(self, on_cpu(device))

    return __init__


def _autocast(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kw: Any
    ) -> None:
        if device_type == "cuda" and enabled:
            # It would switch nothing on: tensors here dispatch as CPU tensors.
            raise NotEmulatedError('torch.autocast("cuda")')
        original(self, "cpu" if device_type == "cuda" else device_type, dtype, enabled, *args, **kw)

    return __init__


def replacements() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, replacement) for everything that decides where a tensor lives."""
    # torch collects once, at the first `with torch.device(...)`, the functions that such a block
    # is for. Under it they are called by ours, so it has to be before they are replaced.
    _device_constructors()
    found: list[tuple[Any, str, Any]] = [
        (torch, name, placed(getattr(torch, name))) for name in FACTORIES if hasattr(torch, name)
    ]
    found += [
        (torch.Tensor, name, placed(getattr(torch.Tensor, name)))
        for name in NEW_METHODS
        if hasattr(torch.Tensor, name)
    ]
    found += [(torch.cuda, name, getattr(torch, name)) for name in TENSOR_TYPES]
    found += [
        (torch, "load", _load(torch.load)),
        (torch.Tensor, "to", _to(torch.Tensor.to)),
        (torch.Tensor, "type", _type(torch.Tensor.type)),
        (torch.Tensor, "cuda", _cuda),
        (torch.Tensor, "pin_memory", _pin_memory),
        (torch.Tensor, "record_stream", _record_stream),
        (DeviceContext, "__init__", _device_context(DeviceContext.__init__)),
        (torch.autocast, "__init__", _autocast(torch.autocast.__init__)),
    ]
    return found
