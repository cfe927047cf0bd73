"""`train()` never writes `args.iteration` back, so that its next call starts over.

Symptom:
    A second `train()` starts at the iteration at which the first one started: with
    `args.train_iters` raised by n it runs all earlier iterations again, on new data, and reports,
    evaluates and saves under numbers that were used before. After an exception the number of
    updates is unknown.

Cause:
    `train()` reads `args.iteration` into a local variable and returns that; the caller, `pretrain`,
    ends there. `args.num_floating_point_operations_so_far` is treated in the same way, while
    `args.consumed_train_samples` is written in place.

Affects:
    Every release. Releases before 0.17 carry `megatron.training` in a source checkout only. What
    the patch does: when `train()` ends (by return, exception, or `sys.exit` on an exit condition),
    `args.iteration` counts the iterations whose `train_step` is done, with an update or a skipped
    one; `consumed_train_samples`, `skipped_train_samples` and
    `num_floating_point_operations_so_far` agree with it. An iteration that was interrupted after
    its step (in logging, evaluation, saving) counts, and the rest of it is not repeated. To train n
    more iterations, set `args.train_iters = args.iteration + n` and call `train()` again. Not
    covered: an exception between the optimizer's update and the scheduler's step (`clip_qk`, a dump
    of the parameters); and with `rl_use_sequence_packing` one between the step and the counting
    leaves the samples out.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/training.py, `train`.

Remove when:
    `train()` writes `args.iteration`. `upstream/train-iteration-lost` has the repair.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_idempotent.megatron import training

from ._case import TRAINING, Fault, Original, Patch, a_body_has, address, program, target

# The iteration of this train() whose train_step has returned; empty before the first one has.
_stepped: list[int | None] = []
#: Local variables of `train()` that `_settle` reads.
_COUNTERS = frozenset({"start_iteration", "iteration", "num_floating_point_operations_so_far"})


def train(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run upstream's `train`, then store the last iteration as `args.iteration`.
    If `train` raises, store the last iteration whose step was completed.
    """
    from megatron.training import get_args

    options = get_args()
    began = options.iteration
    _stepped.clear()
    try:
        returned = original(*args, **kwargs)
    except BaseException as error:
        if options.iteration == began:
            _settle(options, error)
        raise
    try:
        iteration, num_floating_point_operations_so_far = returned
    except (TypeError, ValueError):
        # A body that a user accepted by name: no reason to lose all of a training.
        import logging

        logging.getLogger("megatron_idempotent").warning(
            "train() returned %s: args.iteration stays %d", type(returned).__name__, began
        )
        return returned
    if options.iteration == began:  # otherwise upstream has set it
        options.iteration = iteration
        options.num_floating_point_operations_so_far = num_floating_point_operations_so_far
    return returned


def train_step(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run upstream's `train_step`, and record the iteration if its step was completed."""
    from megatron.training import get_args

    result = original(*args, **kwargs)
    _, _, _, should_exit, *_ = result
    if not should_exit:  # with should_exit the step ends before the update
        # Only `train()` sets it; frameworks may call the step directly.
        _stepped[:] = [getattr(get_args(), "curr_iteration", None)]
    return result


def _settle(options: Any, error: BaseException) -> None:
    train_locals = training.locals_of("train", error)
    if train_locals is None or not train_locals.keys() >= _COUNTERS:  # it did not reach its loop
        return
    iteration = train_locals["iteration"]
    operations = train_locals["num_floating_point_operations_so_far"]
    step = training.locals_of("train_step", error)
    # train_step sets skipped_iter once optimizer and scheduler are done; losses come after that.
    if _stepped == [iteration] or (step is not None and "skipped_iter" in step):
        iteration += 1
        samples = _count_samples(options)
        operations += sys.modules[TRAINING].num_floating_point_operations(options, samples)
    options.iteration = iteration
    options.num_floating_point_operations_so_far = operations


def _count_samples(options: Any) -> int:
    from megatron.core.num_microbatches_calculator import (
        get_current_global_batch_size,
        get_current_running_global_batch_size,
    )

    samples: int = get_current_running_global_batch_size()
    if not getattr(options, "rl_use_sequence_packing", False):
        options.consumed_train_samples += samples
        options.skipped_train_samples += get_current_global_batch_size() - samples
    return samples


def reproduce() -> None:
    """Run `train()` over one iteration; on stock Megatron `args.iteration` is 0 afterwards."""
    running = program()
    running.train(1)
    if running.args.iteration != 1:
        raise Fault(f"args.iteration is {running.args.iteration} after one iteration")


PATCH = Patch(
    "train() never writes args.iteration back: the next call starts over",
    target(
        "training.train",
        train,
        "iteration = args.iteration",
        "args.curr_iteration = iteration",
        "return iteration, num_floating_point_operations_so_far",
    ),
    target("training.train_step", train_step, "skipped_iter = 0"),
    groups=("train-again",),
    fixed_when=a_body_has("args.iteration = iteration"),
    fixed_by=((address("training.train"), "args.iteration = iteration"),),
)
