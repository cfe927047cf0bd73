"""Makes CPU ranks refuse what a GPU would refuse: host and device tensors in one operation.

With device="checked" the runtime answers for CUDA as always, and knows of each tensor's memory, by
how it was made, whether it would be the host's or the device's. An operation on both raises
`PlacementError`, as torch would on a GPU. So do `numpy()` of a device tensor, a host generator that
is to fill a device tensor, and a host tensor in a collective of a group that is NCCL's. A tensor
that was made for `other.device`, which is the CPU here, has an unknown place, and is not refused.

It finds a missing `.cuda()` on a machine that has no GPU. Importing this imports torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_idempotent.patching.base import PerProcess, PerProcessDict

from . import placement
from .errors import PlacementError

#: Operations that copy between host and device.
_COPIES = ("copy_", "_to_copy", "_copy_from", "_copy_from_and_resize", "_foreach_copy_", "set_")
#: Operations whose indices may be on the host.
_INDEXING = (
    *("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"),
    "index_fill_",  # what torch 2.15 makes of an assignment of a number to rows
)

# Address of a storage → a reference that keeps the address from being used again, and where it is.
_memory: dict[int, tuple[Any, str]] = PerProcessDict(__name__, "_memory")
_gloo_groups: dict[str, bool] = PerProcessDict(__name__, "_gloo_groups")


# Without types in torch.
_Reference: Any = StorageWeakRef


class _NewTensors(PerProcess):
    #: The place of tensors that are made now: "host", "device", "unknown", or None for that of
    #: their inputs.
    making: str | None = None


_state = _NewTensors(__name__, "_state")


def where(tensor: torch.Tensor) -> str | None:
    """Return "host" or "device", or None if the tensor's place is not known."""
    storage = _storage(tensor)
    if storage is None:
        return None
    known = _memory.get(storage._cdata)
    return None if known is None else known[1]


def _storage(tensor: torch.Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # sparse, or a subclass without one
        return None


def _put(tensor: torch.Tensor, place: str) -> None:
    storage = _storage(tensor)
    if storage is not None and storage._cdata not in _memory and place != "unknown":
        if len(_memory) % 10_000 == 9_999:
            for address in [a for a, (kept, _) in _memory.items() if kept.expired()]:
                del _memory[address]
        _memory[storage._cdata] = (_Reference(storage), place)


class _Checks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        places = [where(tensor) for tensor in tensors]
        if _state.making is None:
            # A barrier's tensor is torch's own.
            if func.namespace == "c10d" and func._opname != "barrier":
                _check_collective(func, args, tensors, places)
            elif func._opname not in _COPIES:
                _check_mixture(func, tensors, places)
        result = func(*args, **kwargs)
        # What torch makes for itself is where it belongs; `_made` knows what a caller makes.
        inputs = next((place for place in ("device", "host") if place in places), "unknown")
        place = _state.making or inputs
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                _put(leaf, place)
        return result


def _check_mixture(func: Any, tensors: list[torch.Tensor], places: list[str | None]) -> None:
    if "device" not in places:
        return
    rest = list(zip(tensors, places, strict=True))
    if func._opname in _INDEXING and places[0] == "device":
        rest = [(t, p) for t, p in rest if t.dtype not in (torch.int64, torch.bool, torch.uint8)]
    for tensor, place in rest:
        # A number in a tensor goes along with the call.
        if place == "host" and tensor.dim():
            raise PlacementError(
                f"{func}: a tensor of shape {tuple(tensor.shape)} is on the host, and another one "
                "on the device; move it there with cuda()"
            )


def _check_collective(
    func: Any, args: Any, tensors: list[torch.Tensor], places: list[str | None]
) -> None:
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            group = dist.ProcessGroup.unbox(leaf)
            if group.group_name in _gloo_groups:
                return
            for tensor, place in zip(tensors, places, strict=True):
                if place == "host":
                    raise PlacementError(
                        f"{func}: a tensor of shape {tuple(tensor.shape)} is on the host, and the "
                        "group is NCCL's on GPUs; move it to the device with cuda()"
                    )


@contextlib.contextmanager
def making(place: str) -> Iterator[None]:
    """Make tensors at this place inside of the block, and refuse nothing."""
    before, _state.making = _state.making, place
    try:
        yield
    finally:
        _state.making = before


def _moved(tensor: torch.Tensor, place: str) -> torch.Tensor:
    """Return the tensor if it is at this place, else a copy that is."""
    if place != "unknown" and where(tensor) == place:
        return tensor
    with making(place):
        return tensor.clone()


def _asked(device: Any) -> str:
    """Return the place that `device` means; "unknown" for the CPU, which may be a tensor's own."""
    if isinstance(device, torch.Tensor):
        return where(device) or "unknown"
    return "device" if placement.on_cpu(device) is not device else "unknown"


def _made(original: Callable[..., Any], *, like_self: bool = False) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None:
            if not like_self:
                given = any(isinstance(each, torch.Tensor) for each in tree_leaves((args, kwargs)))
                with contextlib.nullcontext() if given else making("host"):
                    return original(*args, **kwargs)
            device = args[0]
        place = _asked(device)
        generator = kwargs.get("generator")
        # Under the runtime CUDA's generators are the host's default one, so only another is wrong.
        if place == "device" and generator not in (None, torch.default_generator):
            raise PlacementError(
                f"{original.__name__}: a host generator fills a device tensor; pass a generator of "
                "the device"
            )
        with making(place):
            result = original(*args, **kwargs)
        return _moved(result, place) if isinstance(result, torch.Tensor) else result

    return call


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("device", args[0] if args else kwargs.get("other"))
        result = original(self, *args, **kwargs)
        if given is None or isinstance(given, torch.dtype):
            return result
        return _moved(result, _asked(given))

    return to


def _cuda(self: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return _moved(self, "device")


def _cpu(self: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return _moved(self, "host")


def _numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if where(self) == "device":
            raise PlacementError("numpy() of a device tensor; copy it to the host with cpu()")
        return original(self, *args, **kwargs)

    return numpy


def _new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        group = original(*args, **kwargs)
        backend = kwargs.get("backend", args[2] if len(args) > 2 else None)
        if isinstance(group, dist.ProcessGroup) and "gloo" in str(backend):
            _gloo_groups[group.group_name] = True
        return group

    return new_group


@contextlib.contextmanager
def checking() -> Iterator[None]:
    """Check this thread's operations inside of the block, in a rank with the runtime on.

    Functions of torch stay replaced until the process ends.
    """
    for name in placement.FACTORIES:
        if hasattr(torch, name):
            setattr(torch, name, _made(getattr(torch, name)))
    for name in placement.NEW_METHODS:
        setattr(torch.Tensor, name, _made(getattr(torch.Tensor, name), like_self=True))
    tensor: Any = torch.Tensor
    tensor.to, tensor.numpy = _to(tensor.to), _numpy(tensor.numpy)
    tensor.cuda, tensor.cpu = _cuda, _cpu
    group = _new_group(dist.new_group)
    dist.new_group = distributed_c10d.new_group = group
    with _Checks():  # type: ignore[no-untyped-call]
        yield
