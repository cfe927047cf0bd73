"""An exception inside a window or a step leaves timers running: the next one cannot start them.

Symptom:
    `AssertionError: timer has already been started` from the window or the optimizer step behind
    one that raised, with `--timing-log-level` 1 or 2, or with any `config.timers`.

Cause:
    The schedules, `finalize_model_grads` and the optimizers start and stop their timers without a
    `finally`.

Affects:
    Every release. What the patch does: where a schedule, `finalize_model_grads` or an optimizer's
    `step` raises, the timers that were started inside are stopped. What they measured in earlier
    iterations stays; the broken one counts as nothing. `prepare_grads` and
    `step_with_ready_grads`, called on their own, are not covered.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/timers.py, `Timer.start`.

Remove when:
    the schedules and the optimizers stop their timers in a `finally`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_idempotent.engine import Patch, Reproduction, Target

from . import _schedules
from ._timers import stopping

_OPTIMIZER = "megatron.core.optimizer.optimizer"


def schedule(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around the three schedules, whose arguments are keywords."""
    from megatron.core.utils import get_model_config

    timers = get_model_config(_schedules.chunks(kwargs["model"])[0]).timers
    return stopping(timers, original, *args, **kwargs)


def finalize(original: Callable[..., Any], model: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Around `finalize_model_grads`, which streaming callers call by themselves."""
    from megatron.core.utils import get_model_config

    return stopping(get_model_config(model[0]).timers, original, model, *args, **kwargs)


def step(original: Callable[..., Any], self: Any) -> Any:
    """Around the optimizers' `step`."""
    # A chain of no optimizers, on a rank whose parameters are frozen, has no config.
    return stopping(getattr(getattr(self, "config", None), "timers", None), original, self)


def reproduce() -> None:
    """A forward-only window that raises, and the same again in good order."""
    from megatron.core.timers import Timers

    from megatron_idempotent.cpu import tiny

    from ._train import Broken

    model = tiny.build(overlap_grad_reduce=False)
    model.config.timers = Timers(2, "minmax")

    def broken(index: int, loss: Any) -> None:
        raise Broken("a microbatch that cannot be read")

    model.on_microbatch = broken
    try:
        model.forward_backward(2, data_seed=0, forward_only=True)
    except Broken:
        model.on_microbatch = None
    model.forward_backward(2, data_seed=0, forward_only=True)


PATCH = Patch(
    id="timers-left-running",
    summary="an exception in a window or a step leaves timers running, and the next one asserts",
    since="0.12",
    before="0.20",
    targets=(
        *_schedules.targets(schedule),
        Target(
            address="megatron.core.distributed.finalize_model_grads:finalize_model_grads",
            wrapper=finalize,
            reviewed={
                "defce03a6c3f": "0.12.0 to 0.12.3",
                "a5ccdc9a9d86": "0.13.0 to 0.13.1",
                "07254adbb771": "0.14.0",
                "35fe5bcef1df": "0.15.0 to 0.15.3",
                "041ebe4a2b4c": "0.16.0 to 0.17.1",
                "889106273b30": "0.18.0 to 0.18.2",
                "198844e3a74f": "0.19.0 to 0.19.2",
            },
            relies_on=("config.timers('all-grads-sync', log_level=1)",),
        ),
        Target(
            address=f"{_OPTIMIZER}:MixedPrecisionOptimizer.step",
            wrapper=step,
            reviewed={"5c5d2a035b76": "0.12.0 to 0.18.2", "d430f8b4abee": "0.19.0 to 0.19.2"},
        ),
        Target(
            address=f"{_OPTIMIZER}:FP32Optimizer.step",
            wrapper=step,
            reviewed={"eeb0640de682": "0.12.0 to 0.18.2", "a6f03ced2b0c": "0.19.0 to 0.19.2"},
        ),
        Target(
            address=f"{_OPTIMIZER}:ChainedOptimizer.step",
            wrapper=step,
            reviewed={
                "4fd61c3e485d": "0.12.0 to 0.12.3",
                "d818bd287c1e": "0.13.0 to 0.13.1",
                "c30da5d35482": "0.14.0 to 0.17.1",
                "c5cecdd9658c": "0.18.0 to 0.18.2",
                "ae1b5bfed51c": "0.19.0 to 0.19.2",
            },
        ),
    ),
    upstream="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/timers.py",
    reproduction=Reproduction(
        run=reproduce,
        ranks=2,
        stock_error=r"AssertionError: timer has already been started",
    ),
)
