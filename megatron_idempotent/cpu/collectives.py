"""Process groups: gloo wherever NCCL is asked for. Imports torch; loaded by `enable()` only.

gloo of torch 2.13 has what Megatron calls: reduce_scatter_tensor, all_gather_into_tensor, their
coalesced forms, AVG, bf16 and fp16, uneven all_to_all_single and batch_isend_irecv. So the
collectives are real ones, asynchronous handles included; only the choice of backend changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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


def replacements() -> list[tuple[Any, str, Any]]:
    found: list[tuple[Any, str, Any]] = []
    for name in GROUP_MAKERS:
        replacement = on_gloo(getattr(dist, name))
        found += [(dist, name, replacement), (distributed_c10d, name, replacement)]
    return found
