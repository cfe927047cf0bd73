"""slime's `train()`, called once per rollout, asserts from its second call on.

Symptom:
    With `--overlap-grad-reduce`: `AssertionError: When overlap_grad_reduce is True,
    config.no_sync_func must be None`, at the second rollout. After a rollout without a step, or
    one that raised in its first step, `config.param_sync_func` is None; with `--manual-gc` Python's
    garbage collector is off between the rollouts.

Cause:
    slime has a copy of upstream's `train()`: it installs the chunks' `no_sync`, disables the
    collector and unsets `param_sync_func`, and does not undo that.

Affects:
    Every release that has `slime.backends.megatron_utils.model.train`, read from 0.1.0 to 0.3.1.
    What the patch does: the same as `no-sync-func-reentry`, `param-sync-func-lost` and
    `gc-stays-off` for upstream. A custom `no_sync_func` still ends in the assertion. With
    `--overlap-param-gather` the second call also needs `forward-pre-hook-reentry`. The upper bound
    of the range is open, because the statements that the patch relies on decide.

Upstream:
    https://github.com/THUDM/slime/pull/1857 accepts the chunks' own `no_sync`.
    https://github.com/THUDM/slime/issues/1779 and https://github.com/THUDM/slime/pull/2066 report
    it.

Remove when:
    slime's `train()` accepts its own `no_sync` and undoes the rest in a `finally`.
    `upstream/slime-train-reentry` has the repair.
"""

from __future__ import annotations

from megatron_idempotent.patches._case import Patch

from . import _copies


def reproduce() -> None:
    """Run two rollouts of one step each through slime's `train()`, with overlap_grad_reduce.
    Without the patch the second call asserts on `config.no_sync_func`.
    """
    from ._rollouts import run_twice

    run_twice("slime")


PATCH = Patch(
    "slime's train() asserts on config.no_sync_func in its second rollout",
    _copies.rollout_target("slime.backends.megatron_utils.model"),
    since="0.1",
    fixed_when=_copies.rollout_is_repaired,
    fixed_by=(
        (
            "slime.backends.megatron_utils.model:train",
            "config.no_sync_func in "
            "(None, model[0].no_sync, [model_chunk.no_sync for model_chunk in model])",
        ),
    ),
    stock_error=r"AssertionError: .*config\.no_sync_func must be None",
)
