"""Megatron's three pipeline schedules: patch targets, the window they ask, deferred gradients.

Only `accumulation_window()` fills the list of open windows; without it a schedule's wrapper looks
at an empty list.

With `defer_embedding_wgrad_compute` the output layer keeps its inputs and output gradients in two
lists, and its weight gradient is computed from them after the last backward. Upstream wants the
fused CUDA kernel for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from megatron_idempotent.patching import Target
from megatron_idempotent.patching.per_process import PerProcessList

MODULE = "megatron.core.pipeline_parallel.schedules"
UPSTREAM = (
    "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/pipeline_parallel/"
    "schedules.py"
)

# Body hash → releases, read by a person for every case file that wraps the function at its entry
# and exit. All three take keyword arguments only.
_REVIEWED = {
    "forward_backward_no_pipelining": {
        "59d4677d2564": "0.12.0 to 0.12.3",
        "97e76df08320": "0.13.0 to 0.13.1",
        "304e44b5a6db": "0.14.0",
        "4646d8d8b1d5": "0.15.0 to 0.15.3",
        "3193b6797f6a": "0.16.0 to 0.16.1",
        "63af6e40baba": "dev, December 2025",
        "33a368e7fcb9": "0.17.0 to 0.17.1",
        "73806e7d90c1": "0.18.0 to 0.18.2",
        "e9dd386913fc": "0.19.0 to 0.19.2",
        "49f4bdf661cc": "main, August 2026",
        "e5a729969a7d": "dev, August 2026",
    },
    "forward_backward_pipelining_with_interleaving": {
        "567d062c7124": "0.12.0 to 0.12.3",
        "8da5ef4fc1c7": "0.13.0 to 0.13.1",
        "ae6de63d9fe2": "0.14.0",
        "02a17a90d7d7": "0.15.0 to 0.15.3",
        "aa08a25ca39f": "0.16.0 to 0.16.1",
        "18e9c500a3bd": "dev, December 2025",
        "baa41967b1ae": "0.17.0 to 0.17.1",
        "67b949acf7eb": "0.18.0 to 0.18.2",
        "b66fcdb04fdb": "0.19.0 to 0.19.2",
        "10092ac41d56": "main, August 2026",
        "8f77b97ef758": "miles' fork, August 2026",
        "36a1d9e3c568": "dev, August 2026",
    },
    "forward_backward_pipelining_without_interleaving": {
        "5ac75944be80": "0.12.0 to 0.12.3",
        "0d04afe48007": "0.13.0 to 0.13.1",
        "a30efefdeb61": "0.14.0",
        "e1e00fe6677c": "0.15.0 to 0.15.3",
        "0284f5009a48": "0.16.0 to 0.16.1",
        "ac54f47a43a7": "dev, December 2025",
        "9fe519775707": "0.17.0 to 0.17.1",
        "3b88e42dc5d4": "0.18.0 to 0.18.2",
        "a6ed1053b864": "0.19.0 to 0.19.2",
        "c6c498d1d00a": "main, August 2026",
        "4b0842a5f14a": "dev, August 2026",
    },
}


def targets(wrapper: Callable[..., Any], *names: str) -> tuple[Target, ...]:
    """The schedules called `names`, all three by default, under one wrapper."""
    return tuple(
        Target(address=f"{MODULE}:{name}", wrapper=wrapper, reviewed=_REVIEWED[name])
        for name in names or _REVIEWED
    )


def chunks(model: Any) -> list[Any]:
    """The model chunks of a schedule's `model` argument, which may be one chunk alone."""
    return list(model) if isinstance(model, list) else [model]


class Window(Protocol):
    """Runs the schedule calls of some model chunks."""

    def holds(self, chunk: Any) -> bool:
        """Returns whether the chunk is one of the window's."""

    def run(self, schedule: Callable[..., Any], **call: Any) -> Any:
        """One call of the schedule, as part of the window."""


open_windows: list[Window] = PerProcessList(__name__, "open_windows")


def are_held(chunks: list[Any]) -> bool:
    """Returns whether an open window holds one of the chunks."""
    return any(window.holds(chunk) for window in open_windows for chunk in chunks)


def around(schedule: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """`schedule`, or the same inside of the open window that holds a chunk of `model`."""
    for window in open_windows:
        if any(window.holds(chunk) for chunk in chunks(model)):
            return partial(window.run, schedule)
    return schedule


#: Those that defer.
SCHEDULES = (
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)


def drain_target(wrapper: Callable[..., Any]) -> Target:
    """The function that computes the deferred gradient."""
    return Target(
        address="megatron.core.utils:drain_embedding_wgrad_compute",
        wrapper=wrapper,
        reviewed={"f9fd584dcfd3": "0.12.0 to 0.13.1", "af081b2e07d0": "0.14.0 to 0.19.2"},
    )


def buffers(model: Any) -> tuple[list[Any], list[Any]] | None:
    """Activations and output gradients kept on the last stage; None where nothing is deferred."""
    holder = _holder(model[-1] if isinstance(model, list) else model)
    return (
        None if holder is None else (holder.embedding_activation_buffer, holder.grad_output_buffer)
    )


def weight(chunk: Any) -> Any:
    """The weight whose gradient the chunk defers; None where it defers none, or it is frozen."""
    holder = _holder(chunk)
    if holder is None:
        return None
    # As upstream's schedules find it.
    if holder.share_embeddings_and_output_weights:
        found = holder.output_layer.weight
    else:
        found = holder.shared_embedding_or_output_weight()
    return found if found is not None and found.requires_grad else None


def _holder(chunk: Any) -> Any:
    from megatron.core.utils import get_attr_wrapped_model, get_model_config

    if not get_model_config(chunk).defer_embedding_wgrad_compute:
        return None
    try:
        holder = get_attr_wrapped_model(chunk, "embedding_activation_buffer", return_model_obj=True)
    except RuntimeError:  # upstream's word for: no module has it
        return None
    if holder.embedding_activation_buffer is None or holder.grad_output_buffer is None:
        return None
    return holder
