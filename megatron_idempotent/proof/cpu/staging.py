"""Runs collectives of ranks that share a GPU over gloo, through host memory.

NCCL refuses two ranks on one GPU, and gloo's own support of CUDA tensors has no point-to-point
messages and no coalesced reductions. So tensors are copied to the host, the collective runs there
as it does on CPU ranks, and its outputs are copied back when its handle is waited for: until then a
later kernel on the current stream sees the old values, and after that the new ones, as with NCCL.
It is off until `begin`: each call is torch's own before that.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import _pytree

from megatron_idempotent.patching.base import PerProcess

from . import placement

#: The place of the argument that a collective writes to; None for one that only sends.
WRITES: dict[str, int | None] = {
    "_all_gather_base": 0,
    "_reduce_scatter_base": 0,
    "all_gather": 0,
    "all_gather_into_tensor": 0,
    "all_gather_single": 0,  # torch 2.13's name of it
    "all_reduce": 0,
    "all_to_all": 0,
    "all_to_all_single": 0,
    "broadcast": 0,
    "gather": 1,
    "irecv": 0,
    "isend": None,
    "recv": 0,
    "reduce": 0,
    "reduce_scatter": 0,
    "reduce_scatter_single": 0,
    "reduce_scatter_tensor": 0,
    "scatter": 0,
    "send": None,
}

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors that a collective writes to, each with the host's copy of it."""


class _StagedDevice(PerProcess):
    #: The type of the device whose tensors are staged; None if nothing is staged.
    device: str | None = None


_state = _StagedDevice(__name__, "_state")
# Group → what the collectives of an open `_coalescing_manager` will have written.
_coalesced: dict[Any, Copies] = {}


def begin(device: str) -> None:
    """Stage collectives of this process from now on, on gloo groups."""
    _state.device = device


def end() -> None:
    """Leave collectives to torch again."""
    _state.device = None


def replacements() -> list[tuple[Any, str, Any]]:
    """Return (owner, attribute, replacement) for all names of torch's collectives."""
    on_gloo = {name: value for _, name, value in placement.collective_replacements()}
    owners = {(owner, name) for owner, name, _ in placement.collective_replacements()}
    owners |= {(owner, name) for owner in (dist, distributed_c10d) for name in WRITES}
    found: dict[str, Any] = {}
    for name in {name for _, name in owners}:
        original = getattr(distributed_c10d, name, None)
        if original is not None:
            other = on_gloo.get(name, original)
            found[name] = _while_staging(original, _staged(other) if name in WRITES else other)
    manager = distributed_c10d._coalescing_manager
    found["_coalescing_manager"] = _while_staging(manager, _staged_manager(manager))
    owners |= {(owner, "_coalescing_manager") for owner in (dist, distributed_c10d)}
    return [
        (owner, name, found[name])
        for owner, name in owners
        if name in found and name in vars(owner)
    ]


def _while_staging(original: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (original if _state.device is None else other)(*args, **kwargs)

    return call


def _staged(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective so that it runs on copies in host memory."""
    signature = inspect.signature(original)
    place = WRITES[original.__name__]
    writes = "" if place is None else list(signature.parameters)[place]

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        on_host: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def staged(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.device.type != _state.device:
                return leaf
            # The same tensor twice is one copy. The copy waits for the kernels that write it.
            if id(leaf) not in on_host:
                on_host[id(leaf)] = (leaf, leaf.detach().to("cpu", copy=True))
            return on_host[id(leaf)][1]

        written = [
            leaf
            for leaf in _pytree.tree_leaves(bound.arguments.get(writes))
            if isinstance(leaf, torch.Tensor)
        ]
        arguments = {
            name: _pytree.tree_map(staged, value) if _holds_tensors(value) else value
            for name, value in bound.arguments.items()
        }
        copies = [on_host[id(leaf)] for leaf in written if id(leaf) in on_host]
        result = original(**arguments)
        group = bound.arguments.get("group") or dist.group.WORLD
        if group in _coalesced:
            _coalesced[group] += copies
            return result
        handle = _Staged(result, copies)
        if isinstance(result, dist.Work) or hasattr(result, "wait"):
            return handle
        handle.copy_back()
        return result

    return call


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, list, tuple))


class _Staged:
    """Stands for a collective on host memory; `wait` copies its outputs to the device."""

    def __init__(self, work: Any, copies: Copies) -> None:
        self._work, self._copies = work, copies

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Wait for the collective, and put the copies back on the current stream."""
        if self._work is not None:
            self._work.wait(*args, **kwargs)
        self.copy_back()
        return True

    def is_completed(self) -> bool:
        """Return True once the outputs are written."""
        return bool(self._work.is_completed()) and self.wait()

    def copy_back(self) -> None:
        """Copy the outputs from the host to the device. Twice: no-op."""
        copies, self._copies = self._copies, []
        with torch.no_grad():
            for tensor, host in copies:
                tensor.copy_(host)


def _staged_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_coalescing_manager` so that its collectives' outputs are copied back at its end."""

    @functools.wraps(original)
    @contextlib.contextmanager
    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        key = group or dist.group.WORLD
        copies = _coalesced[key] = []
        try:
            # No device: it asks for NCCL's own way to coalesce.
            with original(group, None, async_ops) as cm:
                yield cm
        finally:
            del _coalesced[key]
        handle = _Staged(None, copies)
        if async_ops:
            cm.append(handle)  # after the collectives: handles are waited for in turn
        else:
            handle.wait()

    return manager
