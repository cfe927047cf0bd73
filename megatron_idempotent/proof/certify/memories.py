"""Gives a CPU rank a host memory of its own while an adapter offloads, and holds it to what moved.

Under the runtime host and device are one memory, in which `cpu()` copies nothing: an optimizer
that is moved would stay where it is, and a parameter whose memory is freed after `cpu()` would be
lost. Inside of `apart()` the two are two, as on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .protocol import Subject, Wrong

_DEVICE, _HOST = torch.device("cuda", 0), torch.device("cpu")


class Memories:
    """Knows where a subject's parameters, gradients and optimizer state are.

    Example: `memories.offload(adapter)`.
    """

    def __init__(self, subject: Subject) -> None:
        """Take all that there is to be on the device."""
        self._subject = subject
        # By address, with the storage, so that no other one gets its address.
        self._host: dict[int, Any] = {}

    def offload(self, adapter: Any, *, freeing: bool = True) -> None:
        """Call the adapter's `offload`; with `freeing`, hold it to giving some memory back.

        Raises:
            Wrong: all is on the device as before.
        """
        # The storages are kept, so that no other one gets their addresses.
        before = {name: (_storage(each), _size(each)) for name, each in self._held().items()}
        with self.apart():
            adapter.offload()
        after = {name: (_storage(each), _size(each)) for name, each in self._held().items()}
        if freeing and all(
            name in after and after[name][0]._cdata == storage._cdata and after[name][1] == size
            for name, (storage, size) in before.items()
        ):
            raise Wrong(
                f"offload() has moved and freed none of {len(before)} tensors: parameters, "
                "gradients and optimizer state are where they were"
            )

    def onload(self, adapter: Any, *, training: bool = True) -> None:
        """Call the adapter's `onload`, and hold it to bringing back what is needed then.

        Raises:
            Wrong: something is still on the host, or without memory.
        """
        with self.apart():
            adapter.onload(training=training)
        call = "onload()" if training else "onload(training=False)"
        held = self._held() if training else self._parameters()
        for what, lacking in (
            ("are on the host", [name for name, each in held.items() if self._is_host(each)]),
            ("have no memory", [name for name, each in held.items() if _freed(each)]),
        ):
            if lacking:
                raise Wrong(
                    f"after {call} {len(lacking)} tensors {what}, the first is {lacking[0]}"
                )

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Tell host and device memory apart inside of the block, and copy between them."""
        tensor: Any = torch.Tensor
        names = ("cpu", "cuda", "to", "is_cuda", "device")
        before = {name: vars(tensor)[name] for name in names if name in vars(tensor)}
        to = tensor.to
        own = {
            "cpu": lambda tensor, *_, **__: self._moved(tensor, _HOST),
            "cuda": lambda tensor, *_, **__: self._moved(tensor, _DEVICE),
            "to": self._to(to),
            "is_cuda": property(lambda tensor: self._device(tensor) == _DEVICE),
            "device": property(self._device),
        }
        for name in names:
            setattr(tensor, name, own[name])
        try:
            yield
        finally:
            for name in names:
                if name in before:
                    setattr(tensor, name, before[name])
                else:
                    delattr(tensor, name)

    def _to(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            asked = kwargs.get("device", args[0] if args else kwargs.get("other"))
            if isinstance(asked, Tensor):
                asked = asked.device
            found = original(tensor, *args, **kwargs)
            if asked is None or isinstance(asked, torch.dtype):
                return found
            kind = "cuda" if isinstance(asked, int) else torch.device(asked).type
            return self._moved(found, _HOST if kind == "cpu" else _DEVICE)

        return to

    def _moved(self, tensor: Any, place: torch.device) -> Any:
        if self._is_host(tensor) == (place == _HOST):
            return tensor
        copy = tensor.clone()
        if place == _HOST:
            storage = _storage(copy)
            self._host[storage._cdata] = storage
        return copy

    def _device(self, tensor: Any) -> torch.device:
        own: torch.device = torch._C.TensorBase.device.__get__(tensor)
        if own != _HOST:  # torch's own tensors without memory, of which it learns shapes
            return own
        return _HOST if self._is_host(tensor) else _DEVICE

    def _is_host(self, tensor: Any) -> bool:
        return _storage(tensor)._cdata in self._host

    def _parameters(self) -> dict[str, Any]:
        """Return what a forward reads, by name."""
        return {
            f"{name} of chunk {index}": each
            for index, chunk in enumerate(self._subject.chunks)
            for name, each in [*chunk.named_parameters(), *chunk.named_buffers()]
        }

    def _held(self) -> dict[str, Any]:
        """Return the same with gradients and what the optimizer keeps."""
        held = self._parameters()
        for name, each in list(held.items()):
            for kind in ("main_grad", "grad"):
                gradient = getattr(each, kind, None)
                if gradient is not None:
                    held[f"the gradient of {name}"] = gradient
        outer = self._subject.optimizer
        for number, one in enumerate(getattr(outer, "chained_optimizers", [outer])):
            inner = getattr(one, "optimizer", one)  # torch's own, or what Megatron's is around
            if inner is None:
                continue
            parameters = [each for group in inner.param_groups for each in group["params"]]
            for index, parameter in enumerate(parameters):
                of = f"parameter {index} of optimizer {number}"
                held[of] = parameter
                for name, value in inner.state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and value.dim():  # a step's number may be anywhere
                        held[f"{name} of {of}"] = value
        return held


def _storage(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def _size(tensor: Any) -> int:
    """Return the bytes of the memory that a tensor is in: 0 once that is freed."""
    return int(_storage(tensor).nbytes())


def _freed(tensor: Any) -> bool:
    return bool(getattr(tensor, "_local_tensor", tensor).numel()) and not _size(tensor)
