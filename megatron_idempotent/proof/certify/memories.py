"""Checks that an adapter's `offload` and `onload` move memory between device and host."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_idempotent.proof.cpu.placement import naming_devices

from .parameters import inner_optimizers, updated_by
from .protocol import Subject, Wrong


class Memories:
    """Checks that an adapter's `offload` frees device memory, and `onload` brings tensors back.

    Example: `Memories(adapter, subject).offload()`.
    """

    def __init__(self, adapter: Any, subject: Subject) -> None:
        self._adapter, self._subject = adapter, subject

    def offload(self, *, freeing: bool = True, **kwargs: Any) -> None:
        """Call the adapter's `offload` with `kwargs`. If `freeing` is true, raise `Wrong` if the
        call has neither moved nor freed any tensor.

        Raises:
            Wrong: `freeing` is true, and no tensor was moved or freed.
        """
        # References keep the storages alive, so that no new one gets an old address.
        tensors_before = self._tensors()
        memory_before = _memory_of(tensors_before)
        storages = [_storage(tensor) for tensor in tensors_before.values()]
        with naming_devices():
            self._adapter.offload(**kwargs)
        memory_after = _memory_of(self._tensors())
        storages.clear()
        if freeing and memory_before.items() <= memory_after.items():
            raise Wrong(
                f"offload() has moved and freed none of {len(memory_before)} tensors: parameters, "
                "gradients and optimizer state are where they were"
            )

    def onload(self, *, training: bool = True) -> None:
        """Call the adapter's `onload`; raise `Wrong` if a tensor is not back on the device. With
        `training=False` only parameters and buffers are checked.

        Raises:
            Wrong: a tensor is still on the host, or has no memory.
        """
        with naming_devices():
            self._adapter.onload(training=training)
        call = "onload()" if training else "onload(training=False)"
        tensors = self._tensors() if training else self._parameters()
        for fault, names in (
            ("are on the host", [name for name, t in tensors.items() if not _local(t).is_cuda]),
            ("have no memory", [name for name, t in tensors.items() if _freed(t)]),
        ):
            if names:
                raise Wrong(f"after {call} {len(names)} tensors {fault}, the first is {names[0]}")

    def away_and_back(self, *, freeing: bool = True, **kwargs: Any) -> None:
        """Call the adapter's `offload(**kwargs)` and then `onload()`. Raise `Wrong` if a tensor is
        not back on the device; if `freeing` is true, also if nothing was offloaded.
        """
        self.offload(freeing=freeing, **kwargs)
        self.onload()

    def _parameters(self) -> dict[str, Any]:
        """Return this rank's parameters and buffers, by names that include the chunk's index."""
        return {
            f"{name} of chunk {index}": tensor
            for index, chunk in enumerate(self._subject.chunks)
            for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]
        }

    def _tensors(self) -> dict[str, Any]:
        """Return this rank's parameters, buffers, gradients and optimizer moments, by name."""
        tensors = self._parameters()
        for name, parameter in list(tensors.items()):
            for kind in ("main_grad", "grad"):
                gradient = getattr(parameter, kind, None)
                if gradient is not None:
                    tensors[f"the gradient of {name}"] = gradient
        for number, inner in enumerate(inner_optimizers(self._subject.optimizer)):
            for index, parameter in enumerate(updated_by(inner)):
                parameter_name = f"parameter {index} of optimizer {number}"
                tensors[parameter_name] = parameter
                for name, value in inner.state.get(parameter, {}).items():
                    # A count of steps may be anywhere.
                    if isinstance(value, Tensor) and value.dim():
                        tensors[f"{name} of {parameter_name}"] = value
        return tensors


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def _storage(tensor: Any) -> Any:
    return _local(tensor).untyped_storage()


def _size(tensor: Any) -> int:
    """Return the size of a tensor's storage in bytes; 0 once the storage is freed."""
    return int(_storage(tensor).nbytes())


def _memory_of(tensors: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the identity and the size in bytes of each tensor's storage, by name."""
    return {name: (_storage(tensor)._cdata, _size(tensor)) for name, tensor in tensors.items()}


def _freed(tensor: Any) -> bool:
    return bool(_local(tensor).numel()) and not _size(tensor)
