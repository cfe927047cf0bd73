"""Runs Megatron's collectives on gloo: on CPU ranks, and for ranks that share a GPU.

It imports torch, so only `enable()` and ranks on a GPU load it. gloo of torch 2.8 to 2.15 can do
nearly all that Megatron calls: reduce_scatter_tensor, all_gather_into_tensor, their coalesced
forms, AVG, bf16 and fp16, unequal parts in reduce_scatter and all_to_all_single, and
batch_isend_irecv. So the collectives are real ones, asynchronous handles included; only the backend
and the form of some arguments change. An all_gather of unequal sizes, which NCCL takes and gloo
refuses, is padded to the largest and cut again.

Ranks that share a GPU run them through host memory: NCCL refuses two ranks on one GPU, and gloo's
own support of CUDA tensors has no point-to-point messages and no coalesced reductions. So tensors
are copied to the host, the collective runs there as it does on CPU ranks, and its outputs are
copied back when its handle is waited for: until then a later kernel on the current stream sees the
old values, and after that the new ones, as with NCCL. This is off until `begin`: each call is
torch's own before that.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.utils import _pytree

from megatron_idempotent.patching.base import PerProcess, PerProcessDict

#: gloo's devices, by the id of the process that made them.
_devices: dict[int, Any] = PerProcessDict(__name__, "_devices")

GROUP_MAKERS = ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration")


def on_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a torch function that makes process groups, so that groups use gloo if the caller asks
    for NCCL or names no backend.
    """

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        # init_process_group takes the backend first, the others by name.
        first = original.__name__ == "init_process_group" and args
        backend = args[0] if first else kwargs.get("backend")
        if backend is None or "nccl" in str(backend).lower():  # "cpu:gloo,cuda:nccl", too
            backend = "gloo"
        if first:
            args = (backend, *args[1:])
        else:
            kwargs["backend"] = backend
        kwargs |= dict.fromkeys({"device_id", "pg_options"} & kwargs.keys())
        return original(*args, **kwargs)

    return make


def on_one_device(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of gloo's process groups so that all groups of a process use one device.

    A device has a thread, which wakes up a hundred times a second although nothing is sent. With a
    device each, as torch has it, the groups of a few idle ranks take a good part of a core.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        devices = _devices.get(os.getpid())  # not those of a parent, whose threads a fork leaves
        if devices is not None and len(args) == 3 and not kwargs.get("enable_reconfigure"):
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = devices
            if "timeout" in kwargs:
                options._timeout = kwargs["timeout"]
            original(self, *args, options)
            return
        original(self, *args, **kwargs)
        if devices is None and hasattr(self, "options"):
            _devices[os.getpid()] = self.options._devices

    return __init__


def with_listed_splits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap all_to_all_single so that it also takes split sizes as tensors, which are converted to
    lists.

    Megatron's token dispatcher brings the sizes to the host as numpy arrays, but passes tensors
    that are on the host already as they are.
    """

    @functools.wraps(original)
    def all_to_all_single(output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        def listed(value: Any) -> Any:
            return value.tolist() if isinstance(value, torch.Tensor) else value

        kwargs = {name: listed(value) for name, value in kwargs.items()}
        return original(output, input, *map(listed, args), **kwargs)

    return all_to_all_single


def with_unequal_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap all_gather so that its output tensors may differ in shape, which NCCL allows and gloo
    does not. The ranks take part in one collective.

    Megatron gathers the tokens of tensor-parallel experts so, and whole parameters for the
    layer-wise optimizer. Each rank sends as much as the largest output holds.
    """

    @functools.wraps(original)
    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        unequal = (
            isinstance(tensor_list, (list, tuple))
            and all(isinstance(output, torch.Tensor) for output in tensor_list)
            and len({output.shape for output in tensor_list}) > 1
        )
        # Every rank passes the same sizes, so all of them decide alike.
        if not unequal or (rank := dist.get_rank(group)) < 0:
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
        parts = [
            filled[: out.numel()].view_as(out)
            for out, filled in zip(tensor_list, received, strict=True)
        ]
        handle = _Copying(work, list(zip(tensor_list, parts, strict=True)))
        if async_op:
            return handle
        handle.wait()
        return None

    return all_gather


Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Output tensors of a collective, each with the copy that the collective writes."""


class _Copying:
    """The handle of a collective that ran on copies; `wait` copies the results into the real
    outputs.
    """

    def __init__(self, work: Any, copies: Copies) -> None:
        self._work, self._copies = work, copies

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Wait for the collective, as `dist.Work.wait` does; then copy its results into the real
        outputs, on the current stream.
        """
        if self._work is not None:
            self._work.wait(*args, **kwargs)
        self.copy_back()
        return True

    def is_completed(self) -> bool:
        """Return whether the collective has ended; if so, copy its results into the outputs."""
        return bool(self._work.is_completed()) and self.wait()

    def copy_back(self) -> None:
        """Copy the collective's results into the real outputs; a second call does nothing."""
        copies, self._copies = self._copies, []
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)


def holding_the_storage(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap isend so that the sent tensor's memory stays alive until the message has left.

    The interleaved schedule frees a stage's output (`deallocate_output_tensor`) while its send is
    in flight. NCCL keeps the storage; gloo keeps the tensor object only, and would send what the
    memory holds by then.
    """

    @functools.wraps(original)
    def isend(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return original(tensor.detach(), *args, **kwargs)

    return isend


def collective_replacements() -> list[tuple[Any, str, Any]]:
    entries: list[tuple[Any, str, Any]] = []
    for name in GROUP_MAKERS:
        replacement = on_gloo(getattr(dist, name))
        entries += [(dist, name, replacement), (distributed_c10d, name, replacement)]
        if name in vars(device_mesh):  # bound early; asks for NCCL before torch 2.11
            entries.append((device_mesh, name, replacement))
    exchange = with_listed_splits(dist.all_to_all_single)
    gather = with_unequal_sizes(dist.all_gather)
    send = holding_the_storage(dist.isend)
    for owner in (dist, distributed_c10d):
        entries += [
            (owner, "all_to_all_single", exchange),
            (owner, "all_gather", gather),
            (owner, "isend", send),
        ]
    return entries


#: The index of the argument that a collective writes to; None for one that only sends.
WRITES: dict[str, int | None] = {
    **dict.fromkeys(("_all_gather_base", "all_gather", "all_gather_into_tensor"), 0),
    "all_gather_single": 0,  # torch 2.13's name of it
    **dict.fromkeys(("all_reduce", "all_to_all", "all_to_all_single", "broadcast", "reduce"), 0),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter", "reduce_scatter_tensor"), 0),
    **dict.fromkeys(("reduce_scatter_single", "irecv", "recv", "scatter"), 0),
    "gather": 1,
    "isend": None,
    "send": None,
}


class _StagedDevice(PerProcess):
    #: The type of the device whose tensors are copied to the host; None before `begin`.
    device: str | None = None


_state = _StagedDevice(__name__, "_state")
# Group → the copies that collectives in its open `_coalescing_manager` write.
_coalesced: dict[Any, Copies] = {}


def begin(device: str) -> None:
    """Run this process's collectives from now on over gloo, on host copies of the tensors on
    `device`.
    """
    _state.device = device


def replacements() -> list[tuple[Any, str, Any]]:
    """Return (owner, attribute, replacement) for torch's collectives, and for its functions that
    make process groups. A replacement calls the original until `begin` is called in this process.
    """
    on_gloo = {name: value for _, name, value in collective_replacements()}
    owners = {(owner, name) for owner, name, _ in collective_replacements()}
    owners |= {(owner, name) for owner in (dist, distributed_c10d) for name in WRITES}
    by_name: dict[str, Any] = {}
    for name in {name for _, name in owners}:
        original = getattr(distributed_c10d, name, None)
        if original is not None:
            replacement = on_gloo.get(name, original)
            by_name[name] = _while_staging(
                original, _staged(replacement) if name in WRITES else replacement
            )
    manager = distributed_c10d._coalescing_manager
    by_name["_coalescing_manager"] = _while_staging(manager, _staged_manager(manager))
    owners |= {(owner, "_coalescing_manager") for owner in (dist, distributed_c10d)}
    return [
        (owner, name, by_name[name])
        for owner, name in owners
        if name in by_name and name in vars(owner)
    ]


def _while_staging(original: Callable[..., Any], staged: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (original if _state.device is None else staged)(*args, **kwargs)

    return call


def _staged(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective so that it runs on host copies, and its outputs are copied back."""
    signature = inspect.signature(original)
    index = WRITES[original.__name__]
    writes = "" if index is None else list(signature.parameters)[index]

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
            name: _pytree.tree_map(staged, value)
            if isinstance(value, (torch.Tensor, list, tuple))
            else value
            for name, value in bound.arguments.items()
        }
        copies = [on_host[id(leaf)] for leaf in written if id(leaf) in on_host]
        result = original(**arguments)
        group = bound.arguments.get("group") or dist.group.WORLD
        if group in _coalesced:
            _coalesced[group] += copies
            return result
        handle = _Copying(result, copies)
        if isinstance(result, dist.Work) or hasattr(result, "wait"):
            return handle
        handle.copy_back()
        return result

    return call


def _staged_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's `_coalescing_manager`, whose block groups several collectives, so that their
    outputs are copied back when the block ends or, if asynchronous, when the handle is waited for.
    """

    @functools.wraps(original)
    @contextlib.contextmanager
    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        key = group or dist.group.WORLD
        copies = _coalesced[key] = []
        try:
            # Without a device: with one torch coalesces by NCCL's own way.
            with original(group, None, async_ops) as cm:
                yield cm
        finally:
            del _coalesced[key]
        handle = _Copying(None, copies)
        if async_ops:
            cm.append(handle)  # after the collectives: handles are waited for in turn
        else:
            handle.wait()

    return manager
