"""A second training with one Megatron trainer of ms-swift asserts on the first one's `no_sync`.

Symptom:
    With `overlap_grad_reduce`: `AssertionError: When overlap_grad_reduce is True,
    config.no_sync_func must be None`, from the second `train()` of a trainer, or the second
    `setup_model_training()`.

Cause:
    `setup_model_training` installs the chunks' `no_sync` in the trainer's config, and never removes
    it.

Affects:
    4.3 on, read to 4.5.2; for 4.0 to 4.2 see `swift-train-reentry`. What the patch does: a
    `no_sync_func` that is the `no_sync` of the trainer's own chunks is cleared before the check,
    and a `param_sync_func` that the previous training unset, and did not restore because no step
    succeeded, is restored. A custom function still ends in the assertion. The upper bound of the
    range is open, because the statements that the patch relies on decide.

Upstream:
    https://github.com/modelscope/ms-swift/blob/v4.5.2/swift/megatron/trainers/base.py,
    `setup_model_training`.

Remove when:
    ms-swift accepts the chunks' own `no_sync`. `upstream/swift-setup-reentry` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Original, Patch, no_body_has, target

from . import _copies


def setup(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `setup_model_training`, but first undo the config changes of an earlier training."""
    config = self.config
    _copies.forget_no_sync(config, self.wrapped_models)
    if config.param_sync_func is None:
        config.param_sync_func = getattr(self, "_saved_param_sync_func", None)
    return original(self, *args, **kwargs)


def reproduce() -> None:
    """Set up one ms-swift trainer twice, with overlap_grad_reduce.
    Without the patch the second call asserts on `config.no_sync_func`.
    """
    from ._swift import trainer

    swift = trainer(["--overlap-grad-reduce"])
    swift.setup_model_training()
    swift.setup_model_training()


PATCH = Patch(
    "a second training with one trainer of ms-swift asserts on config.no_sync_func",
    target(
        "swift.megatron.trainers.base:BaseMegatronTrainer.setup_model_training",
        setup,
        "config = self.config",
        "config.no_sync_func = [model_chunk.no_sync for model_chunk in self.wrapped_models]",
        "self._saved_param_sync_func = config.param_sync_func",
    ),
    since="4.3",
    fixed_when=no_body_has("config.no_sync_func is None"),
    fixed_by=(
        (
            "swift.megatron.trainers.base:BaseMegatronTrainer.setup_model_training",
            "config.no_sync_func in "
            "(self.wrapped_models[0].no_sync, [m.no_sync for m in self.wrapped_models])",
        ),
    ),
    stock_error=r"AssertionError: .*config\.no_sync_func must be None",
)
