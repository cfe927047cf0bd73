"""Offloads and copies a subject's parameters and optimizer state, with Megatron's own functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import megatron_idempotent

from .protocol import Subject


def offload(subject: Subject) -> None:
    """Move optimizer state and parameters to the host, and free the gradients, as Megatron does."""
    # First, because the distributed optimizer's parameters in float32 are views of the model's.
    subject.optimizer.offload_to_cpu()
    for chunk in subject.chunks:
        chunk.offload_grad_buffers()
        for buffer in buffers(chunk):
            buffer.offload_to_cpu(move_grads=False)


def onload(subject: Subject, *, training: bool) -> None:
    """Bring all of it back, or without `training` the parameters alone."""
    for chunk in subject.chunks:
        for buffer in buffers(chunk):
            buffer.reload_from_cpu(move_grads=False)
        chunk.module.cuda()  # the optimizer's own, where it updates the model's parameters in place
        if training:
            chunk.restore_grad_buffers()
    if training:
        subject.optimizer.restore_from_cpu()


def buffers(chunk: Any) -> list[Any]:
    """Return a chunk's buffers of parameters and gradients, experts' too."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def state_of(subject: Subject) -> dict[str, Any]:
    """Copy parameters and optimizer state of this rank, as a checkpoint would.

    What the optimizer updates are main parameters in float32, where the model is in bfloat16.
    """
    megatron_idempotent.ensure_params_synced(subject.chunks)
    inner = _inner(subject.optimizer)
    return {
        "model": [
            [each.detach().clone() for each in chunk.module.parameters()]
            for chunk in subject.chunks
        ],
        "main": [[each.detach().clone() for each in _updated(one)] for one in inner],
        "optimizer": [
            [
                {
                    name: value.clone() if isinstance(value, Tensor) else value
                    for name, value in one.state[p].items()
                }
                for p in _updated(one)
                if p in one.state
            ]
            for one in inner
        ],
    }


def restore(subject: Subject, state: dict[str, Any]) -> None:
    """Put back what `state_of` has copied."""
    with torch.no_grad():
        for chunk, values in zip(subject.chunks, state["model"], strict=True):
            for parameter, value in zip(chunk.module.parameters(), values, strict=True):
                parameter.copy_(value)
    kept = zip(_inner(subject.optimizer), state["main"], state["optimizer"], strict=True)
    for one, values, states in kept:
        with torch.no_grad():
            for parameter, value in zip(_updated(one), values, strict=True):
                parameter.copy_(value)
        if states:
            for parameter, moments in zip(_updated(one), states, strict=True):
                one.state[parameter] = moments


def _updated(optimizer: Any) -> list[Any]:
    """Return the parameters that a torch optimizer updates."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def _inner(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each.optimizer for each in chained if getattr(each, "optimizer", None) is not None]
