"""`train()` never writes `args.iteration` back, so that its next call starts over.

Symptom:
    A second `train()` starts at the iteration at which the first one started: with
    `args.train_iters` raised by n it runs all earlier iterations again, on new data, and reports,
    evaluates and saves under numbers that were used before.

Cause:
    `train()` reads `args.iteration` into a local variable and returns that; the caller, `pretrain`,
    ends there. `args.num_floating_point_operations_so_far` is treated alike, while
    `args.consumed_train_samples` is written in place.

Affects:
    Every release. Releases before 0.17 carry `megatron.training` in a source checkout only. What
    the patch does: on return both are written back. After an exception `args.iteration` is the
    iteration that was interrupted. To train n more iterations, set
    `args.train_iters = args.iteration + n` and call `train()` again.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/training.py, `train`.

Remove when:
    `train()` writes `args.iteration`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_idempotent.engine import Patch, Reproduction

from . import _train


def train(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around upstream's `train`: keep `args.iteration` up to date."""
    from megatron.training import get_args

    options = get_args()
    before = getattr(options, "curr_iteration", None)
    returned = None
    try:
        returned = original(*args, **kwargs)
        return returned
    finally:
        if returned is not None:
            options.iteration, options.num_floating_point_operations_so_far = returned
        elif getattr(options, "curr_iteration", None) != before:
            options.iteration = options.curr_iteration


def reproduce() -> None:
    """One call of stock `train()` over one iteration."""
    from megatron_idempotent.cpu import program

    running = program.start()
    running.train(1)
    if running.args.iteration != 1:
        raise RuntimeError(f"args.iteration is {running.args.iteration} after one iteration")


PATCH = Patch(
    id="train-iteration-lost",
    summary="train() never writes args.iteration back: the next call starts over",
    since="0.12",
    before="0.20",
    targets=(
        _train.target(
            train,
            "iteration = args.iteration",
            "args.curr_iteration = iteration",
            "return iteration, num_floating_point_operations_so_far",
        ),
    ),
    fixed_when=lambda bodies: any(
        body.contains("args.iteration = iteration") for body in bodies.values()
    ),
    upstream=_train.UPSTREAM,
    reproduction=Reproduction(
        run=reproduce,
        ranks=2,
        stock_error=r"RuntimeError: args\.iteration is 0 after one iteration",
    ),
)
