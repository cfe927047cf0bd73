"""Puts tensors on the CPU for every spelling of "a CUDA device", and collectives on gloo.

It imports torch, so only `enable()` loads it. It replaces only the functions that can be given a
device, in the namespace where callers look them up. A `TorchFunctionMode` would also catch calls
made through early-bound names, at the price of a detour around *every* torch call
(benchmarks/cpu_overhead.py has the numbers); Megatron binds none of these names early.

gloo of torch 2.8 to 2.15 can do nearly all that Megatron calls: reduce_scatter_tensor,
all_gather_into_tensor, their coalesced forms, AVG, bf16 and fp16, unequal parts in reduce_scatter
and all_to_all_single, and batch_isend_irecv. So the collectives are real ones, asynchronous handles
included; only the backend and the form of some arguments change. An all_gather of unequal sizes,
which NCCL takes and gloo refuses, is padded to the largest and cut again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.utils._device import DeviceContext, _device_constructors

from .errors import NotEmulatedError

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
    """Return the CPU for "cuda", "cuda:1", torch.device("cuda") and bare indices; others as is."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return CPU if device.split(":")[0] == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


def placed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `original` so that its `device` argument means the CPU, and nothing is pinned."""

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


def tensor_replacements() -> list[tuple[Any, str, Any]]:
    """Return (owner, attribute, replacement) for all that decides where a tensor is."""
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


GROUP_MAKERS = (
    "init_process_group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
)


def on_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `original` so that backend "nccl", or none, which means NCCL on CUDA, is gloo."""
    # init_process_group takes the backend first, the others by name.
    first = original.__name__ == "init_process_group"

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if first and args:
            args = (gloo_for(args[0]), *args[1:])
        else:
            kwargs["backend"] = gloo_for(kwargs.get("backend"))
        if kwargs.get("device_id") is not None:
            kwargs["device_id"] = None
        if kwargs.get("pg_options") is not None:
            kwargs["pg_options"] = None
        return original(*args, **kwargs)

    return make


def gloo_for(backend: Any) -> Any:
    """Return the backend to use: gloo for "nccl", "cpu:gloo,cuda:nccl" or None; others as is."""
    if backend is None or "nccl" in str(backend).lower():
        return "gloo"
    return backend


def with_listed_splits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap all_to_all_single so that split sizes may be tensors, which become lists.

    Megatron's token dispatcher brings the sizes to the host as numpy arrays, but only from tensors
    whose `is_cuda` is true; here it passes the tensors themselves.
    """

    @functools.wraps(original)
    def all_to_all_single(output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_listed(value) for value in args)
        kwargs = {name: _listed(value) for name, value in kwargs.items()}
        return original(output, input, *args, **kwargs)

    return all_to_all_single


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def with_unequal_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap all_gather so that it takes outputs of unequal sizes, as NCCL does, in one collective.

    Megatron gathers the tokens of tensor-parallel experts so, and whole parameters for the
    layer-wise optimizer. Each rank sends as much as the largest output holds.
    """

    @functools.wraps(original)
    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        # Every rank passes the same sizes, so all of them decide alike.
        if not _unequal(tensor_list) or (rank := dist.get_rank(group)) < 0:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        if tensor.numel() != tensor_list[rank].numel():
            raise ValueError(
                f"all_gather: rank {rank} of the group sends {tensor.numel()} elements, but its "
                f"entry of tensor_list holds {tensor_list[rank].numel()}: pass the same sizes on "
                "every rank"
            )
        largest = max(output.numel() for output in tensor_list)
        sent = tensor.new_zeros(largest)
        sent[: tensor.numel()] = tensor.detach().reshape(-1)
        received = [output.new_empty(largest) for output in tensor_list]
        work = original(received, sent, group=group, async_op=True)
        handle = _PaddedGather(work, received, tensor_list)
        if async_op:
            return handle
        handle.wait()
        return None

    return all_gather


def _unequal(tensors: Any) -> bool:
    return (
        isinstance(tensors, (list, tuple))
        and all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        and len({tensor.shape for tensor in tensors}) > 1
    )


class _PaddedGather:
    """Stands for a gather that was padded; cuts the received tensors when it is waited for."""

    def __init__(
        self, work: Any, received: list[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        self._work = work
        self._received = received
        self._outputs = tuple(outputs)

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Wait for the gather, then fill the outputs; take arguments as `dist.Work.wait` does."""
        self._work.wait(*args, **kwargs)
        with torch.no_grad():
            for output, padded in zip(self._outputs, self._received, strict=True):
                output.copy_(padded[: output.numel()].view_as(output))
        self._received, self._outputs = [], ()  # waiting again changes nothing
        return True

    def is_completed(self) -> bool:
        """Return True once the outputs are filled."""
        if self._work.is_completed():
            return self.wait()
        return False


def holding_the_storage(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap isend so that it sends an alias, whose memory lives until the message has left.

    The interleaved schedule frees a stage's output (`deallocate_output_tensor`) while its send is
    in flight. NCCL keeps the storage; gloo keeps the tensor object only, and would send what the
    memory holds by then.
    """

    @functools.wraps(original)
    def isend(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return original(tensor.detach(), *args, **kwargs)

    return isend


def collective_replacements() -> list[tuple[Any, str, Any]]:
    found: list[tuple[Any, str, Any]] = []
    for name in GROUP_MAKERS:
        replacement = on_gloo(getattr(dist, name))
        found += [(dist, name, replacement), (distributed_c10d, name, replacement)]
        if name in vars(device_mesh):  # bound early; asks for NCCL before torch 2.11
            found.append((device_mesh, name, replacement))
    exchange = with_listed_splits(dist.all_to_all_single)
    gather = with_unequal_sizes(dist.all_gather)
    send = holding_the_storage(dist.isend)
    for owner in (dist, distributed_c10d):
        found += [
            (owner, "all_to_all_single", exchange),
            (owner, "all_gather", gather),
            (owner, "isend", send),
        ]
    return found
