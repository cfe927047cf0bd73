"""A second `train()` of one Megatron trainer of ms-swift asserts on the first one's `no_sync`.

Symptom:
    With `overlap_grad_reduce`: `AssertionError: When overlap_grad_reduce is True,
    config.no_sync_func must be None`, from the second `train()` of a trainer. After one without a
    successful step `config.param_sync_func` is None.

Cause:
    The same as in upstream's `train()`, of which it is a copy.

Affects:
    4.0 to 4.2; for later releases, which split the method, see `swift-setup-reentry`. What the
    patch does: the same as `no-sync-func-reentry` and `param-sync-func-lost` for upstream.

Upstream:
    https://github.com/modelscope/ms-swift/blob/v4.2.3/swift/megatron/trainers/base.py, `train`.

Remove when:
    4.2 is no longer supported.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Original, Patch, a_body_has, no_body_has, target

from . import _copies


def train(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ms-swift's `train`; before and after it reset the config, so that it can run again."""
    config = self.config
    _copies.forget_no_sync(config, self.wrapped_models)
    return _copies.restoring(
        original, (self, *args), kwargs, config=config, param_sync_func=config.param_sync_func
    )


def reproduce() -> None:
    """Run ms-swift's `train()` without iterations twice, with overlap_grad_reduce.
    Without the patch the second call asserts on `config.no_sync_func`.
    """
    from ._swift import trainer

    swift = trainer(["--overlap-grad-reduce"])
    swift.train(None, None)
    swift.train(None, None)


PATCH = Patch(
    "a second train() of one trainer of ms-swift asserts on config.no_sync_func",
    target(
        "swift.megatron.trainers.base:BaseMegatronTrainer.train",
        train,
        "config = self.config",
        "config.no_sync_func = [model_chunk.no_sync for model_chunk in self.wrapped_models]",
        "config.param_sync_func = None",
    ),
    since="4.0",
    before="4.3",
    # A commit after 4.2, whose `train` is split, has the hazard in `setup_model_training`.
    fixed_when=lambda bodies: (
        no_body_has("config.no_sync_func is None")(bodies)
        or a_body_has("self.setup_training(train_dataset, val_dataset)")(bodies)
    ),
    stock_error=r"AssertionError: .*config\.no_sync_func must be None",
)
