"""miles' `train()`, called once per rollout, asserts from its second call on.

Symptom:
    With `--overlap-grad-reduce`: `AssertionError: When overlap_grad_reduce is True,
    config.no_sync_func must be None`, at the second rollout. After a rollout without a step, or
    one that raised in its first step, `config.param_sync_func` is None; with `--manual-gc` Python's
    garbage collector is off between the rollouts.

Cause:
    miles is a fork of slime, whose `train()` is a copy of upstream's: see `slime-train-reentry`.

Affects:
    Every release that has `miles.backends.megatron_utils.model.train`, read at 0.1.0. The patch is
    the same as for slime. The upper bound of the range is open, because the statements that the
    patch relies on decide.

Upstream:
    https://github.com/radixark/miles/blob/v0.1.0/miles/backends/megatron_utils/model.py, `train`.

Remove when:
    miles' `train()` accepts its own `no_sync` and undoes the rest in a `finally`.
    `upstream/miles-train-reentry` has the repair.
"""

from __future__ import annotations

from megatron_idempotent.patches._case import Patch

from . import _copies


def reproduce() -> None:
    """Run two rollouts of one step each through miles' `train()`, with overlap_grad_reduce.
    Without the patch the second call asserts on `config.no_sync_func`.
    """
    from ._rollouts import run_twice

    run_twice("miles")


PATCH = Patch(
    "miles' train() asserts on config.no_sync_func in its second rollout",
    _copies.rollout_target("miles.backends.megatron_utils.model"),
    since="0.1",
    fixed_when=_copies.rollout_is_repaired,
    fixed_by=(
        (
            "miles.backends.megatron_utils.model:train",
            "config.no_sync_func in "
            "(None, model[0].no_sync, [model_chunk.no_sync for model_chunk in model])",
        ),
    ),
    stock_error=r"AssertionError: .*config\.no_sync_func must be None",
)
