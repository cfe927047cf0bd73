"""Process groups: gloo wherever NCCL is asked for. Imports torch; loaded by `enable()` only.

gloo of torch 2.13 can do what Megatron calls: reduce_scatter_tensor, all_gather_into_tensor, their
coalesced forms, AVG, bf16 and fp16, uneven all_to_all_single and batch_isend_irecv. So the
collectives are real ones, asynchronous handles included; only the backend and
the form of some arguments change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

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
    """Example: gloo_for("cpu:gloo,cuda:nccl") == "gloo"; "fake" and "mpi" stay."""
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
    exchange = with_listed_splits(dist.all_to_all_single)
    send = holding_the_storage(dist.isend)
    for owner in (dist, distributed_c10d):
        found += [(owner, "all_to_all_single", exchange), (owner, "isend", send)]
    return found
