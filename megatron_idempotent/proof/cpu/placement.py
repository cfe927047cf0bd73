"""Puts tensors on the CPU for every spelling of "a CUDA device"; knows what a GPU would refuse.

It imports torch, so only `enable()` loads it. It replaces only the functions that can be given a
device, in the namespace where callers look them up. A `TorchFunctionMode` would also catch calls
made through early-bound names, at the price of a detour around *every* torch call
(benchmarks/cpu_overhead.py has the numbers); Megatron binds none of these names early.

It tracks which tensors would be in host memory on a GPU machine: tensors made without a device, for
"cpu" or pinned, those that `cpu()` and `to("cpu")` return, and casts and copies of these. `is_cuda`
of such a tensor is False. It is True of all others, also of results of host tensors. `cpu()`,
`cuda()` and `to()` copy between the two memories, so that offloading leaves two tensors.

With device="checked" ranks also refuse host and device tensors in one operation. There a result is
in the memory of its inputs, and a tensor's memory may be unknown. An operation on both memories
raises `PlacementError`, where torch raises on a GPU. So do `numpy()` of a device tensor, a host
generator that is to fill a device tensor, and a host tensor in a collective of a group that is
NCCL's. A tensor that was made for `other.device`, which is the CPU here, is in unknown memory, and
is not refused. These checks find a missing `.cuda()` on a machine that has no GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.multiprocessing import reductions
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _device
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_idempotent.patching.base import PerProcess, PerProcessDict

from . import table
from .errors import NotEmulatedError, PlacementError

CPU = torch.device("cpu")

FACTORIES = table.short(table.FACTORIES)
NEW_METHODS = table.short(table.NEW_METHODS)
COPIES = table.short(table.COPIES)

_clone = torch.Tensor.clone


def on_cpu(device: Any) -> Any:
    """Return the CPU for "cuda", "cuda:1", torch.device("cuda") or an index; return any other
    argument unchanged.
    """
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return CPU if device.split(":")[0] == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


class _OfGroup(str):
    """The string "cpu" as the name of the device on which a process group exchanges Python objects.
    With NCCL that device is the GPU; so tensors made on this "cpu" do not count as host tensors.
    """


def placed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a torch function so that a CUDA `device` means the CPU, and `pin_memory` is ignored.
    Tensors that would be in host memory are recorded as such.
    """

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        device, pinned = None, False
        if kwargs:
            if "device" in kwargs:
                device = kwargs["device"]
                kwargs["device"] = on_cpu(device)
            # Pinning is a property of the device driver; all of this memory is host memory.
            if "pin_memory" in kwargs:
                pinned, kwargs["pin_memory"] = kwargs["pin_memory"], False
        result = original(*args, **kwargs)
        if device is None and not pinned:
            like = args[0] if args else None
            if isinstance(like, torch.Tensor):
                on_host = memory_of(like) == "host"
            else:  # inside of `with torch.device(...)` the default is no longer the host
                on_host = _device.CURRENT_DEVICE is None and "out" not in kwargs
        else:
            on_host = pinned or (device == "cpu" and type(device) is not _OfGroup)
        if on_host:
            _put(result, "host")
        return result

    return call


def _follows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor method that copies or casts, so that the result counts as a host tensor if the
    method was called on a host tensor.
    """

    @functools.wraps(original)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if result is not self and memory_of(self) == "host":
            _put(result, "host")
        return result

    return call


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    follow = _follows(original)

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        target = kwargs.get("device", args[0] if args else kwargs.get("other"))
        if args and not isinstance(args[0], (torch.dtype, torch.Tensor)):
            args = (on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        result = follow(self, *args, **kwargs)
        if target is None or isinstance(target, torch.dtype):
            return result
        return _moved(result, _memory_meant(target))

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


def _is_cuda(self: torch.Tensor) -> bool:
    return bool(self.is_cpu) and memory_of(self) != "host"


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
            # CUDA's autocast would have no effect: tensors here dispatch as CPU tensors.
            raise NotEmulatedError('torch.autocast("cuda")')
        original(self, "cpu" if device_type == "cuda" else device_type, dtype, enabled, *args, **kw)

    return __init__


def _reduced(tensor: torch.Tensor) -> Any:
    """Return the pickle form of a tensor that is sent to another process. It includes the tensor's
    emulated memory, "host" or "device", which the receiver restores.
    """
    reduced = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return _rebuilt, (memory_of(tensor), *reduced)


def _rebuilt(
    memory: str | None, rebuild: Callable[..., torch.Tensor], arguments: Any
) -> torch.Tensor:
    tensor = rebuild(*arguments)
    if memory is not None:
        _put(tensor, memory)
    return tensor


def tensor_replacements() -> list[tuple[Any, str, Any]]:
    """Return (owner, attribute, replacement) for torch's names that decide in which memory a tensor
    is.
    """
    # torch lists the functions that `with torch.device(...)` is for once, at the first such block.
    # It must list the originals, which the replacements call in such a block.
    _device_constructors()
    entries: list[tuple[Any, str, Any]] = [
        (torch, name, placed(getattr(torch, name))) for name in FACTORIES if hasattr(torch, name)
    ]
    entries += [
        (torch.Tensor, name, placed(getattr(torch.Tensor, name)))
        for name in NEW_METHODS
        if hasattr(torch.Tensor, name)
    ]
    reducers = {
        kind: _reduced if reduce is reductions.reduce_tensor else reduce
        for kind, reduce in ForkingPickler._extra_reducers.items()  # type: ignore[attr-defined]
    }
    entries += [
        (torch.cuda, name, getattr(torch, name)) for name in table.short(table.TENSOR_TYPES)
    ]
    entries += [
        (torch, "load", _load(torch.load)),
        (torch.Tensor, "to", _to(torch.Tensor.to)),
        (torch.Tensor, "type", _type(torch.Tensor.type)),
        *((torch.Tensor, name, _follows(getattr(torch.Tensor, name))) for name in COPIES),
        (torch.Tensor, "cuda", lambda self, *_args, **_kwargs: _moved(self, "device")),
        (torch.Tensor, "cpu", lambda self, *_args, **_kwargs: _moved(self, "host")),
        (torch.Tensor, "is_cuda", property(_is_cuda)),
        (torch.Tensor, "pin_memory", lambda self, _device=None: self),
        # Streams are synchronous here, so no later work can outlive the tensor.
        (torch.Tensor, "record_stream", lambda _self, _stream: None),
        (DeviceContext, "__init__", _device_context(DeviceContext.__init__)),
        (torch.autocast, "__init__", _autocast(torch.autocast.__init__)),
        (ForkingPickler, "_extra_reducers", reducers),
    ]
    return entries


# Where a tensor's memory is.

# Address of a storage → a reference that keeps the address from being reused, and its memory.
_memories: dict[int, tuple[Any, str]] = PerProcessDict(__name__, "_memories")

# Without types in torch.
_Reference: Any = StorageWeakRef


class _NewTensors(PerProcess):
    #: The memory of tensors that are made now: "host", "device", "unknown", or None for that of
    #: their inputs.
    making: str | None = None
    #: True if each operation is checked, and its results get the memory of its inputs.
    checked = False
    #: True if `device` of a device tensor is "cuda:0", so that the CPU means the host.
    names_devices = False


_state = _NewTensors(__name__, "_state")


def memory_of(tensor: torch.Tensor) -> str | None:
    """Return the emulated memory that a tensor is in: "host", "device", or None if not known."""
    storage = _storage(tensor)
    if storage is None:
        return None
    entry = _memories.get(storage._cdata)
    return None if entry is None else entry[1]


def _storage(tensor: torch.Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # sparse, or a subclass without one
        return None


def _put(tensor: torch.Tensor, memory: str) -> None:
    storage = _storage(tensor)
    if storage is not None and storage._cdata not in _memories and memory != "unknown":
        if len(_memories) % 10_000 == 9_999:
            for address in [
                a for a, (reference, _) in list(_memories.items()) if reference.expired()
            ]:
                del _memories[address]
        _memories[storage._cdata] = (_Reference(storage), memory)


@contextlib.contextmanager
def making(memory: str) -> Iterator[None]:
    """Record tensors that are made in the block as being in `memory`, "host" or "device", and check
    no operation in the block.
    """
    previous, _state.making = _state.making, memory
    try:
        yield
    finally:
        _state.making = previous


def _moved(tensor: torch.Tensor, memory: str) -> torch.Tensor:
    """Return the tensor itself if it is in `memory`, "host" or "device"; else return a copy in that
    memory.
    """
    current = memory_of(tensor)
    # On unchecked ranks a tensor is on the device unless it is known to be on the host.
    if current == memory if _state.checked else memory in (current or "device", "unknown"):
        return tensor
    storage = _storage(tensor)
    if storage is not None and tensor.numel() and not storage.size():
        raise RuntimeError(  # a copy ends the process here, and is an error of CUDA's on a GPU
            f"a tensor of shape {list(tensor.shape)} cannot be moved to the {memory}: its memory "
            "is freed (its storage has 0 bytes); give it back first"
        )
    with making(memory):
        copy = _clone(tensor)
    _put(copy, memory)
    return copy


def _memory_meant(device: Any) -> str:
    """Return the memory that an argument `device` asks for: "host" or "device". Return "unknown"
    for `torch.device("cpu")`: outside of `naming_devices`, that is also the `device` of tensors in
    emulated device memory.
    """
    if isinstance(device, torch.Tensor):
        return memory_of(device) or ("unknown" if _state.checked else "device")
    if on_cpu(device) is not device:
        return "device"
    is_named = _state.names_devices or (isinstance(device, str) and type(device) is not _OfGroup)
    return "host" if is_named else "unknown"


@contextlib.contextmanager
def naming_devices() -> Iterator[None]:
    """Let `tensor.device` be "cuda:0" for tensors in emulated device memory, inside of the block.

    There `to(torch.device("cpu"))` moves to the host; elsewhere it may just repeat a tensor's own
    `device`. C code reads `device` as well, so code in the block may move tensors, and not compute.
    """
    tensor: Any = torch.Tensor
    device_getter = torch._C.TensorBase.device.__get__
    cuda_device = torch.device("cuda", 0)
    tensor.device = property(lambda self: cuda_device if _is_cuda(self) else device_getter(self))
    previous, _state.names_devices = _state.names_devices, True
    try:
        yield
    finally:
        _state.names_devices = previous
        if not previous:
            del tensor.device


# Checked ranks.

#: Operations that copy between host and device.
_CROSSING = ("copy_", "_to_copy", "_copy_from", "_copy_from_and_resize", "_foreach_copy_", "set_")
#: Operations whose indices may be on the host.
_INDEXING = (
    *("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"),
    "index_fill_",  # what torch 2.15 makes of an assignment of a number to rows
)

_gloo_groups: dict[str, bool] = PerProcessDict(__name__, "_gloo_groups")


class _Checks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        memories = [memory_of(tensor) for tensor in tensors]
        if _state.making is None:
            # A barrier's tensor is torch's own.
            if func.namespace == "c10d" and func._opname != "barrier":
                _check_collective(func, args, tensors, memories)
            elif func._opname not in _CROSSING:
                _check_mixture(func, tensors, memories)
        result = func(*args, **kwargs)
        # New tensors of torch's own follow their inputs; `_checked_factory` places callers'.
        input_memory = next(
            (memory for memory in ("device", "host") if memory in memories), "unknown"
        )
        memory = _state.making or input_memory
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                _put(leaf, memory)
        return result


def _check_mixture(func: Any, tensors: list[torch.Tensor], memories: list[str | None]) -> None:
    if "device" not in memories:
        return
    pairs = list(zip(tensors, memories, strict=True))
    if func._opname in _INDEXING and memories[0] == "device":
        pairs = [(t, m) for t, m in pairs if t.dtype not in (torch.int64, torch.bool, torch.uint8)]
    for tensor, memory in pairs:
        # A tensor without dimensions passes as a number.
        if memory == "host" and tensor.dim():
            raise PlacementError(
                f"{func}: a tensor of shape {tuple(tensor.shape)} is on the host, and another one "
                "on the device; move it there with cuda()"
            )


def _check_collective(
    func: Any, args: Any, tensors: list[torch.Tensor], memories: list[str | None]
) -> None:
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            group = dist.ProcessGroup.unbox(leaf)
            if group.group_name in _gloo_groups:
                return
            for tensor, memory in zip(tensors, memories, strict=True):
                if memory == "host":
                    raise PlacementError(
                        f"{func}: a tensor of shape {tuple(tensor.shape)} is on the host, and the "
                        "group is NCCL's on GPUs; move it to the device with cuda()"
                    )


def _checked_factory(
    original: Callable[..., Any], *, like_self: bool = False
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None:
            if not like_self:
                has_tensors = any(
                    isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs))
                )
                with contextlib.nullcontext() if has_tensors else making("host"):
                    return original(*args, **kwargs)
            device = args[0]
        memory = _memory_meant(device)
        generator = kwargs.get("generator")
        # Here the device's generator is the host's default one: any other is a host generator.
        if memory == "device" and generator not in (None, torch.default_generator):
            raise PlacementError(
                f"{original.__name__}: a host generator fills a device tensor; pass a generator of "
                "the device"
            )
        with making(memory):
            result = original(*args, **kwargs)
        return _moved(result, memory) if isinstance(result, torch.Tensor) else result

    return call


def _numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if memory_of(self) == "device":
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
    """Raise `PlacementError` for each operation of this thread in the block that combines host and
    device tensors. The CPU runtime must already be on.

    Functions of torch stay replaced until the process ends.
    """
    for name in FACTORIES:
        if hasattr(torch, name):
            setattr(torch, name, _checked_factory(getattr(torch, name)))
    for name in NEW_METHODS:
        setattr(torch.Tensor, name, _checked_factory(getattr(torch.Tensor, name), like_self=True))
    tensor: Any = torch.Tensor
    tensor.numpy = _numpy(tensor.numpy)
    _state.checked = True
    group = _new_group(dist.new_group)
    dist.new_group = distributed_c10d.new_group = group
    device_of = distributed_c10d._get_object_coll_device
    distributed_c10d._get_object_coll_device = lambda group=None: _OfGroup(device_of(group))
    with _Checks():  # type: ignore[no-untyped-call]
        yield
