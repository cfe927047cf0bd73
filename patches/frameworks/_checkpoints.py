"""Shares what case files about frameworks' savers and loaders have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_idempotent.patches._case import Fault, Original

_NOT_SAVED = "Take the run for not saved: the checkpoint before is the last one."
UNCHANGED = "Nothing was loaded on any rank."
_PART = "Ranks may have loaded a part: load a whole checkpoint before a step."


def save(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Save on all ranks, or raise on all of them."""
    from megatron_idempotent.window import agreement

    with agreement.as_one_at_barriers(_NOT_SAVED):
        return original(*args, **kwargs)


def load(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Load on all ranks, or raise on all of them."""
    from megatron_idempotent.window import agreement

    with agreement.as_one_at_barriers(_PART):
        return original(*args, **kwargs)


def expect_told(load: Callable[[], object]) -> None:
    """Load where rank 1 cannot open files; raise if rank 0 waits for it."""
    import resource

    import torch
    from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception

    rank, told, failed = torch.distributed.get_rank(), [False, False], False
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3 if rank else before[0], before[1]))
    try:
        load()
    except (Exception, CheckpointException):  # noqa: BLE001  each kind is a result
        failed = True
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    if failed:  # a rank of stock that has not waits for this
        load()
    torch.distributed.all_gather_object(told, failed)
    if told[0] != told[1]:
        raise Fault("rank 1 could not load, and rank 0 waited for it")
