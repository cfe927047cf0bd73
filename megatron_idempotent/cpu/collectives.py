"""Process groups: gloo wherever NCCL is asked for. Imports torch; loaded by `enable()` only.

gloo of torch 2.8 to 2.13 can do nearly all that Megatron calls: reduce_scatter_tensor,
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

GROUP_MAKERS = (
    "init_process_group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
)


def on_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original` with backend "nccl" (or none, which means NCCL on CUDA) replaced by gloo."""
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
    """Example: `gloo_for("cpu:gloo,cuda:nccl") == "gloo"`; "fake" and "mpi" stay."""
    if backend is None or "nccl" in str(backend).lower():
        return "gloo"
    return backend


def with_listed_splits(original: Callable[..., Any]) -> Callable[..., Any]:
    """all_to_all_single with split sizes as lists.

    Megatron's token dispatcher brings the sizes to the host as numpy arrays, but only from
    tensors whose `is_cuda` is true; here it passes the tensors themselves.
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
    """Make all_gather take outputs of unequal sizes, as NCCL does, in one collective.

    Megatron gathers so the tokens of tensor-parallel experts, and whole parameters for the
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
    """Handle of a gather that was padded; cuts what has arrived when it is waited for."""

    def __init__(
        self, work: Any, received: list[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        self._work = work
        self._received = received
        self._outputs = tuple(outputs)

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Wait for the gather, then fill the outputs; arguments as `torch.distributed.Work`'s."""
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
    """isend of an alias, so that the memory lives until the message has left.

    The interleaved schedule frees a stage's output (`deallocate_output_tensor`) while its send is
    in flight. NCCL keeps the storage; gloo keeps the tensor object only, and would send whatever
    the memory holds by then.
    """

    @functools.wraps(original)
    def isend(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return original(tensor.detach(), *args, **kwargs)

    return isend


def replacements() -> list[tuple[Any, str, Any]]:
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
