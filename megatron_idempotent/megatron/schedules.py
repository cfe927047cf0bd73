"""Routes calls of Megatron's three pipeline schedules to open windows, and stops their timers.

`accumulation_window()` and `TrainStep` fill the list of open windows; otherwise it is empty, and a
schedule's wrapper calls the schedule.

With `defer_embedding_wgrad_compute` the output layer keeps its inputs and output gradients in two
lists, and its weight gradient is computed from them after the last backward. Upstream needs the
fused CUDA kernel for it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Protocol

from megatron_idempotent.patching import install
from megatron_idempotent.patching.base import PerProcessList
from megatron_idempotent.patching.verify import verify_at_start

#: A key of `patching.record.PROVIDED`.
ASKS_WINDOWS = "schedules-ask-windows"


def chunks(model: Any) -> list[Any]:
    """Return the model chunks of a schedule's `model` argument, which may be a single chunk."""
    return list(model) if isinstance(model, list) else [model]


def config_of(model: Any) -> Any:
    """Return the config of the first chunk of a schedule's `model` argument."""
    from megatron.core.utils import get_model_config

    return get_model_config(chunks(model)[0])


def stopping(timers: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `original`; if it raises, stop the timers that it started and did not stop.

    Their earlier times stay, because a line of the log may sum up several iterations.
    """
    by_name = getattr(timers, "_timers", None)
    if by_name is None:  # no timers, or a framework's own
        return original(*args, **kwargs)
    started_before = {name for name, timer in by_name.items() if timer._started}
    try:
        return original(*args, **kwargs)
    except BaseException:
        for name, timer in by_name.items():
            if timer._started and name not in started_before:
                timer._started = False
        raise


class Window(Protocol):
    """Protocol of an open window, of `accumulation_window()` or of a `TrainStep`. While it is open,
    wrappers of the schedules call its `run` for its model chunks, instead of the schedule.
    """

    def holds(self, chunk: Any) -> bool:
        """Return whether `chunk` is one of this window's chunks."""

    def run(self, schedule: Callable[..., Any], **call: Any) -> Any:
        """Run one call of the schedule as part of the window, and return its result."""


open_windows: list[Window] = PerProcessList(__name__, "open_windows")
# Windows that are running a schedule call, which they get only once.
_running: list[Window] = PerProcessList(__name__, "_running")


def are_held(chunks: list[Any]) -> bool:
    """Return whether at least one of the chunks belongs to an open window."""
    return any(window.holds(chunk) for window in open_windows for chunk in chunks)


def around(schedule: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Return the function that a patch calls in place of `schedule`.
    If an open window has one of `model`'s chunks, the function is that window's `run`; without such
    a window it is `schedule` itself.

    Several patches call this, so that windows still work if one of these patches is deleted. For
    a call that a window is already running it returns `schedule`.

    Args:
        schedule: the wrapper's `original`.
        model: the schedule's argument.
    """
    if install.state.verify_within:
        verify_at_start()
    for window in open_windows:
        if any(window.holds(chunk) for chunk in chunks(model)):
            return schedule if window in _running else partial(_run, window, schedule)
    return schedule


def _run(window: Window, schedule: Callable[..., Any], **call: Any) -> Any:
    try:
        _running.append(window)
        return window.run(schedule, **call)
    finally:
        _running[:] = [running for running in _running if running is not window]


@lru_cache(maxsize=1)
def sums_tokens_of_context_ranks() -> bool:
    """Return whether this Megatron sums losses' token counts over context-parallel ranks, too.
    All releases sum the counts over data-parallel ranks.

    0.12 sums them over the data-parallel ranks alone: there a loss function returns the tokens of
    all context-parallel parts of its microbatch.
    """
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    alone = "all_reduce(num_tokens, group=parallel_state.get_data_parallel_group())"
    return alone not in inspect.getsource(module)


def buffers(model: Any) -> tuple[list[Any], list[Any]] | None:
    """Return the two lists that `model`'s last chunk fills for its deferred embedding gradient.
    The first list has the activations, the second one the output gradients. Return None if that
    chunk defers no gradient.
    """
    holder = _holder(model[-1] if isinstance(model, list) else model)
    return (
        None if holder is None else (holder.embedding_activation_buffer, holder.grad_output_buffer)
    )


def weight(chunk: Any) -> Any:
    """Return the output layer's weight whose gradient `chunk` defers.
    None if it defers none, or if that weight is frozen.
    """
    holder = _holder(chunk)
    if holder is None:
        return None
    layer_weight = output_weight(holder)
    return layer_weight if layer_weight is not None and layer_weight.requires_grad else None


def output_weight(holder: Any) -> Any:
    """Return the weight of a GPTModel's output layer: its own, or the embedding's.

    In a stage with MTP layers, which has both, upstream's schedules take the wrong one.
    """
    if holder.share_embeddings_and_output_weights:
        return holder.shared_embedding_or_output_weight()
    return holder.output_layer.weight


def _holder(chunk: Any) -> Any:
    from megatron.core.utils import get_attr_wrapped_model, get_model_config

    if not get_model_config(chunk).defer_embedding_wgrad_compute:
        return None
    try:
        holder = get_attr_wrapped_model(chunk, "embedding_activation_buffer", return_model_obj=True)
    except RuntimeError:  # upstream raises it if no module has the attribute
        return None
    if holder.embedding_activation_buffer is None or holder.grad_output_buffer is None:
        return None
    return holder
