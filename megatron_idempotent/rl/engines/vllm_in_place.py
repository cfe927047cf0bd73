"""Writes updates in place into a model's parameters, including fused and sharded ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_idempotent.rl.weights.deltas import Patch


class Patched(Mapping[str, torch.Tensor]):
    """A read-only mapping of names to the tensors after an update: the update's tensors (`came`),
    and the served tensors that the update does not change. For a patch, each lookup makes a patched
    copy of the served tensor.

    Example: `Patched(served, {"norm.weight": tensor, "head.weight": patch})`.
    """

    def __init__(
        self, served: Mapping[str, torch.Tensor], came: Mapping[str, torch.Tensor | Patch]
    ) -> None:
        self.served, self.came = served, came

    def __getitem__(self, name: str) -> torch.Tensor:
        came = self.came.get(name)
        if isinstance(came, Patch):
            return came.made()
        return self.served[name] if came is None else came

    def __iter__(self) -> Iterator[str]:
        return iter(self.served)

    def __len__(self) -> int:
        return len(self.served)

    def kept(self) -> dict[str, torch.Tensor]:
        """Write the update's patches into the served tensors in place. Return all tensors of the
        new version by name.
        """
        for came in self.came.values():
            if isinstance(came, Patch):
                came.write()
        return {
            name: came.tensor if isinstance(came, Patch) else came
            for name, came in {**self.served, **self.came}.items()
        }


class NotInPlace(Exception):
    """An update cannot be written in place, because the model does not store a checkpoint's
    elements unchanged; the message says why.
    """


class Places:
    """Maps each element of a checkpoint to its position in a vLLM model's parameters, so that
    updates can be written in place.

    The model's loader runs once with meta tensors, and its copies are recorded instead of made, so
    this needs no table of the tensors that it fuses, shards or transposes.

    Example: `Places(model, served).write(update)`.
    """

    def __init__(self, model: Any, served: Mapping[str, torch.Tensor]) -> None:
        """Run the model's loader with meta tensors, and record into which part of which parameter
        the loader would copy each tensor. Raise `NotInPlace` if the loader does more than copy.

        Args:
            model: a model with a `load_weights` method, as vLLM's have.
            served: every tensor that the model has, by its name in a checkpoint.

        Raises:
            NotInPlace: the loader does more than copy elements, or the model's parameters do not
                have the bits of `served` at those positions.
        """
        probes = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in served.items()
        }
        names = {_storage(probe): name for name, probe in probes.items()}
        noted = _Noted(_storage(tensor) for tensor in (*model.parameters(), *model.buffers()))
        try:
            with torch.no_grad(), noted:
                model.load_weights(iter(probes.items()))
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            # The meta tensors have no elements, and a packed layer may have no weight.
            raise NotInPlace(f"its loader wants more than to copy: {error}") from error
        self._copies: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for to, probe in noted.copies:
            name = names.get(_storage(probe), "")
            if not name or (to.dtype, to.shape) != (probe.dtype, probe.shape):
                raise NotInPlace(f"{name or 'a tensor'} is converted as it is loaded")
            if not torch.equal(_bits(to), _bits(_part(served[name], probe).to(to.device))):
                raise NotInPlace(f"{name} is in another layout after it is loaded")
            self._copies.setdefault(name, []).append((to, probe))

    @torch.no_grad()
    def write(self, update: Patched) -> None:
        """Write an update into the model's parameters in place. The model must have the weights
        that the update builds on.
        """
        for name, came in update.came.items():
            for to, probe in self._copies.get(name, ()):
                if isinstance(came, Patch):
                    inside_K, at_K = _moved(came.at_K, probe, to)
                    flat = to.as_strided((to.untyped_storage().nbytes() // to.itemsize,), (1,), 0)
                    Patch(flat, at_K[inside_K], came.new_K[inside_K]).write()
                else:
                    to.copy_(_part(came, probe))


class _Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A torch dispatch mode that records copies into the given storages instead of making the
    copies. Fills of these storages with a constant are skipped, and any other write into them
    raises `NotInPlace`.
    """

    def __init__(self, storages: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._storages = set(storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = func._schema.is_mutable and _storage(args[0]) in self._storages
        if not written:
            return func(*args, **(kwargs or {}))
        # By name: cloudpickle takes `torch.ops` for a module, and cannot pickle it.
        if str(func) == "aten.copy_.default":
            self.copies.append((args[0], args[1]))
        elif str(func.overloadpacket) not in ("aten.fill_", "aten.zero_"):  # padding
            raise NotInPlace(f"its loader writes by {func}")
        return args[0]


def _storage(tensor: torch.Tensor) -> int:
    cdata: int = tensor.untyped_storage()._cdata
    return cdata


def _part(tensor: torch.Tensor, probe: torch.Tensor) -> torch.Tensor:
    """Return the view of `tensor` that has the offset, shape and strides of `probe`, which is a
    view of a meta tensor with the shape of `tensor`.
    """
    contiguous = tensor.contiguous()
    start = contiguous.storage_offset() + probe.storage_offset()
    return contiguous.as_strided(probe.shape, probe.stride(), start)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _moved(at_K: Any, probe: torch.Tensor, to: torch.Tensor) -> tuple[Any, Any]:
    """Map flat indices of a checkpoint's tensor, [K], to flat indices in the storage of the
    parameter `to`, into which the view `probe` of that tensor is copied. Return a mask of the
    indices that are in `probe`, and the mapped indices.

    Returns:
        bool [K], True for indices that the probe covers; and their indices in `to`, int64 [K].
    """
    rest_K = at_K - probe.storage_offset()
    inside_K, moved_K = rest_K >= 0, to.storage_offset()
    dims = sorted(zip(probe.stride(), probe.shape, to.stride(), strict=True), reverse=True)
    for stride, size, target_stride in dims:
        if size > 1:
            index_K, rest_K = rest_K // stride, rest_K % stride
            inside_K = inside_K & (index_K < size)
            moved_K = moved_K + index_K * target_stride
    return inside_K & (rest_K == 0), moved_K
