"""What a pipeline schedule divides the losses by."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.pipeline_parallel import schedules


@contextmanager
def dividing_by(divisor: int) -> Iterator[None]:
    """Replace the number of microbatches where the schedules divide by it.

    They look the function up when they call it; nothing else in it reads the number.
    """
    late = hasattr(schedules, "forward_step_calc_loss")  # 0.14 on; before, forward_step divides
    name = "forward_step_calc_loss" if late else "forward_step"
    original = getattr(schedules, name)
    position = list(inspect.signature(original).parameters).index("num_microbatches")

    def with_divisor(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], divisor, *args[position + 1 :])
        else:
            kwargs["num_microbatches"] = divisor
        return original(*args, **kwargs)

    setattr(schedules, name, with_divisor)
    try:
        yield
    finally:
        setattr(schedules, name, original)
