"""A second `train()` of one trainer of ROLL's mcore_adapter asserts on its own `no_sync_func`.

Symptom:
    With `overlap_grad_reduce`: `AssertionError: When overlap_grad_reduce is True,
    config.no_sync_func must be None`, from the second `train()` of a `McaTrainer`.

Cause:
    `_prepare_train_loop` installs the chunks' `no_sync` in the model's config, and never removes
    it. The chunks are wrapped once, when the trainer is built.

Affects:
    Every release, read in ROLL 0.1.0 to 0.3.0 (mcore_adapter 0.9.0 and 0.10.0.dev0 among them).
    What the patch does: a `no_sync_func` that is the `no_sync` of the trainer's own chunks is
    cleared before the check. A custom function still ends in the assertion. The upper bound of the
    range is open, because the statements that the patch relies on decide. ROLL's
    `MegatronTrainStrategy.initialize` has the same assertion, but builds model and config again.

Upstream:
    https://github.com/alibaba/ROLL/blob/v0.3.0/mcore_adapter/src/mcore_adapter/trainer/trainer.py,
    `_prepare_train_loop`.

Remove when:
    mcore_adapter accepts the chunks' own `no_sync`. `upstream/mca-trainer-reentry` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Original, Patch, no_body_has, program, target

from . import _copies


def prepare(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `_prepare_train_loop`, but first clear a `no_sync_func` of an earlier training."""
    _copies.forget_no_sync(self.model.config, self.models_wrapped)
    return original(self, *args, **kwargs)


def reproduce() -> None:
    """Prepare the training loop of one `McaTrainer` twice, with overlap_grad_reduce.
    Without the patch the second call asserts on `config.no_sync_func`.
    """
    from unittest.mock import MagicMock

    from ._standins import import_alone

    running = program(["--overlap-grad-reduce"])
    module = import_alone("mcore_adapter.trainer.trainer", "accelerate", "transformers")
    module.get_model_param_count = lambda *_, **__: 0
    options = MagicMock(
        gradient_accumulation_steps=1,
        ignore_data_skip=True,
        max_steps=1,
        overlap_grad_reduce=True,
        per_device_train_batch_size=1,
    )
    options.logging_steps = options.eval_steps = options.save_steps = None
    trainer = MagicMock(args=options, models_wrapped=running.chunks, optimizer=running.optimizer)
    trainer.model.config = running.config
    trainer.get_train_dataloader.return_value = [None]
    trainer.num_examples.return_value = 1
    for _ in range(2):
        module.McaTrainer._prepare_train_loop(trainer, 1, options)


PATCH = Patch(
    "a second train() of one trainer of mcore_adapter asserts on config.no_sync_func",
    target(
        "mcore_adapter.trainer.trainer:McaTrainer._prepare_train_loop",
        prepare,
        "model_config = self.model.config",
        "model_config.no_sync_func = "
        "[model_wrapped.no_sync for model_wrapped in self.models_wrapped]",
    ),
    since="0.0",
    fixed_when=no_body_has("model_config.no_sync_func is None"),
    fixed_by=(
        (
            "mcore_adapter.trainer.trainer:McaTrainer._prepare_train_loop",
            "model_config.no_sync_func in (None, self.models_wrapped[0].no_sync, "
            "[model_wrapped.no_sync for model_wrapped in self.models_wrapped])",
        ),
    ),
    stock_error=r"AssertionError: .*config\.no_sync_func must be None",
)
