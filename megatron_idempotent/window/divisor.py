"""Sets the number that a pipeline schedule divides losses by, and the auxiliary losses' weight."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron.core.pipeline_parallel import schedules

from .hold import set_for


@contextmanager
def dividing_by(divisor: int, *, auxiliary_weight: float = 1.0) -> Iterator[None]:
    """Replace the number of microbatches where the schedules divide by it.

    They look the function up when they call it; nothing else in it reads the number. The losses
    of MoE, MTP and experimental attention are multiplied with `auxiliary_weight` besides, unless
    the config has scale functions of their own.
    """
    late = hasattr(schedules, "forward_step_calc_loss")  # 0.14 on; before, forward_step divides
    name = "forward_step_calc_loss" if late else "forward_step"
    original = getattr(schedules, name)
    number, config = _places(original)

    def with_divisor(*args: Any, **kwargs: Any) -> Any:
        if len(args) > number:
            args = (*args[:number], divisor, *args[number + 1 :])
        else:
            kwargs["num_microbatches"] = divisor
        if auxiliary_weight == 1.0:
            return original(*args, **kwargs)
        with ExitStack() as stack:
            its = args[config] if len(args) > config else kwargs["config"]
            # Inside of this function it scales the auxiliary losses only; the loss itself is
            # scaled when its backward starts.
            set_for(stack, its, "grad_scale_func", _times(auxiliary_weight, its.grad_scale_func))
            return original(*args, **kwargs)

    setattr(schedules, name, with_divisor)
    try:
        yield
    finally:
        setattr(schedules, name, original)


@functools.lru_cache(maxsize=8)
def _places(function: Callable[..., Any]) -> tuple[int, int]:
    """Returns the positions of the number of microbatches and the config among its parameters."""
    parameters = list(inspect.signature(function).parameters)
    return parameters.index("num_microbatches"), parameters.index("config")


def _times(weight: float, scale: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    def weighed(loss: Any) -> Any:
        return (loss if scale is None else scale(loss)) * weight

    return weighed
