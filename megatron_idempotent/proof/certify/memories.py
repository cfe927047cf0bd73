"""Holds an adapter that offloads to what has moved between host and device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_idempotent.proof.cpu.placement import naming_devices

from .protocol import Subject, Wrong


class Memories:
    """Knows where a subject's parameters, gradients and optimizer state are.

    Example: `memories.offload(adapter)`.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def offload(self, adapter: Any, *, freeing: bool = True, **how: Any) -> None:
        """Call the adapter's `offload`; with `freeing`, hold it to giving some memory back.

        `how` are its arguments.

        Raises:
            Wrong: all is on the device as before.
        """
        # The storages are kept, so that no other one gets their addresses.
        before = {name: (_storage(each), _size(each)) for name, each in self._held().items()}
        with naming_devices():
            adapter.offload(**how)
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
        with naming_devices():
            adapter.onload(training=training)
        call = "onload()" if training else "onload(training=False)"
        held = self._held() if training else self._parameters()
        for what, lacking in (
            ("are on the host", [name for name, each in held.items() if not _local(each).is_cuda]),
            ("have no memory", [name for name, each in held.items() if _freed(each)]),
        ):
            if lacking:
                raise Wrong(
                    f"after {call} {len(lacking)} tensors {what}, the first is {lacking[0]}"
                )

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


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def _storage(tensor: Any) -> Any:
    return _local(tensor).untyped_storage()


def _size(tensor: Any) -> int:
    """Return the bytes of the memory that a tensor is in: 0 once that is freed."""
    return int(_storage(tensor).nbytes())


def _freed(tensor: Any) -> bool:
    return bool(_local(tensor).numel()) and not _size(tensor)
