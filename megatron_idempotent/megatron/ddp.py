"""Patch targets in Megatron's DDP and its bucket groups, and helpers that act on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_idempotent.engine import Target

_DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
_GROUP = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"

_SOURCE = "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed"
UPSTREAM = f"{_SOURCE}/distributed_data_parallel.py"
GROUP_UPSTREAM = f"{_SOURCE}/param_and_grad_buffer.py"


# Body hash → releases, read by a person for every case file that uses the method.
_REVIEWED = {
    f"{_DDP}.zero_grad_buffer": {
        "a666aac37d3c": "0.12.0 to 0.14.0",
        "5348085597d7": "0.15.0 to 0.19.2",
    },
    f"{_DDP}.finish_grad_sync": {
        "26146eb75257": "0.12.0 to 0.15.3",
        "b07f0803428b": "0.16.0 to 0.19.2",
    },
    f"{_DDP}.no_sync": {"fdadfb70f932": "0.12.0 to 0.19.2"},
    f"{_DDP}.start_grad_sync": {"f747be74da26": "0.12.0 to 0.19.2"},
    f"{_GROUP}.reset": {
        "76f39759ca41": "0.12.0 to 0.15.3",
        "6f1f705b5010": "0.16.0 to 0.17.1",
        "0766e41a2e4b": "0.18.0 to 0.19.2",
    },
    f"{_GROUP}.start_param_sync": {
        "379c45877429": "0.12.0 to 0.13.1",
        "65c8e6f0a8e9": "0.14.0 to 0.16.1",
        "0e5de2e77998": "0.17.0 to 0.17.1",
        "8ee3dc7a52ac": "0.18.0 to 0.18.2",
        "72d1f77a07b6": "0.19.0 to 0.19.2",
        "10cbef4e096a": "dev, August 2026",
        "fba2a8ca7467": "main, April 2026",
    },
    f"{_GROUP}.start_grad_sync": {
        "3d7ad4d330bb": "0.12.0 to 0.13.1",
        "7a5f365cd18a": "0.14.0 to 0.15.3",
        "a0a7f10665a6": "0.16.0 to 0.16.1",
        "2b952730294d": "dev, December 2025",
        "59a4f934d0de": "0.17.0 to 0.17.1",
        "f2194610280b": "0.18.0 to 0.18.2",
        "2afeb4906c63": "0.19.0 to 0.19.2",
        "d94fb2df3991": "dev, August 2026",
        "ba2aa95d8628": "main, July 2026",
    },
    f"{_GROUP}.finish_grad_sync": {
        "78f3e5ea757c": "0.12.0 to 0.15.3",
        "815288b6ec87": "0.16.0 to 0.16.1",
        "af8733cc2ec7": "0.17.0 to 0.17.1",
        "814eaa9d6db1": "0.18.0 to 0.19.2",
    },
}


def ddp_target(method: str, wrapper: Callable[..., Any]) -> Target:
    """A method of `DistributedDataParallel`."""
    address = f"{_DDP}.{method}"
    return Target(address=address, wrapper=wrapper, reviewed=_REVIEWED[address])


def forward_target(wrapper: Callable[..., Any]) -> Target:
    """The forward of a wrapped chunk, which Megatron-FSDP's wrapper shares."""
    return Target(
        address="megatron.core.distributed.data_parallel_base:_BaseDataParallel.forward",
        wrapper=wrapper,
        reviewed={"b6c5ca5dd168": "0.12.0 to 0.19.2"},
    )


def group_target(method: str, wrapper: Callable[..., Any]) -> Target:
    """A method of the bucket group, which holds what one collective reduces or gathers."""
    address = f"{_GROUP}.{method}"
    return Target(address=address, wrapper=wrapper, reviewed=_REVIEWED[address])


def buffer_reset_target(wrapper: Callable[..., Any]) -> Target:
    """The place where a gradient buffer is zeroed, from 0.16 on."""
    return Target(
        address="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.reset",
        wrapper=wrapper,
        reviewed={
            "34bd543142d1": "0.16.0 to 0.16.1",
            "bb35cfe41b7d": "0.17.0 to 0.19.2",
        },
    )


def finalize_target(wrapper: Callable[..., Any]) -> Target:
    """`finalize_model_grads`, which finishes the reductions of all chunks, and sums elsewhere."""
    return Target(
        address="megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        wrapper=wrapper,
        reviewed={
            "9981a336e264": "0.12.0 to 0.12.3",
            "06cef69bcde5": "0.13.0 to 0.13.1",
            "d757b1093f7b": "0.14.0",
            "666715c91e86": "0.15.0 to 0.15.3",
            "0f37fa247958": "0.16.0 to 0.17.1",
            "57647ed5aefd": "0.18.0 to 0.18.2",
            "fc3f2fe46639": "0.19.0 to 0.19.2",
            "fed622e30b26": "main, August 2026",
            "8f6314b8c7f0": "miles' fork, August 2026",
        },
    )


def bucket_groups(chunk: Any) -> list[Any]:
    """All bucket groups of a chunk in Megatron's DDP, dense ones first, as upstream walks them.

    None of a bare module.
    """
    return [
        *getattr(chunk, "bucket_groups", ()),
        *getattr(chunk, "expert_parallel_bucket_groups", ()),
    ]


def forget_first_window(group: Any) -> None:
    """Drop what a bucket group counted in a first window, so that the next one is the first."""
    if group.is_first_batch:
        group.per_param_grad_ready_counts = {}


def drain(group: Any) -> None:
    """Wait for the reduction that a bucket group has in flight, if it has one."""
    handle = group.grad_reduce_handle
    if handle is not None:
        group.grad_reduce_handle = None
        handle.wait()
    elif (
        group.ddp_config.num_distributed_optimizer_instances > 1
        and group.communication_stream is not None
    ):
        import torch

        # No handle tells: upstream orders the streams, as is done here, and never asks the host.
        torch.cuda.current_stream().wait_stream(group.communication_stream)
