"""mcore_adapter's trainer accepts the `no_sync_func` that an earlier training of it installed."""

from upstream.edits import Repair, substitute

REPAIR = Repair(
    edits=(
        substitute(
            "mcore_adapter.trainer.trainer:McaTrainer._prepare_train_loop",
            "model_config.no_sync_func is None",
            """model_config.no_sync_func in (
                None,
                self.models_wrapped[0].no_sync,
                [model_wrapped.no_sync for model_wrapped in self.models_wrapped],
            )""",
        ),
    ),
)
