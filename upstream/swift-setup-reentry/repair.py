"""ms-swift sets up a further training of one trainer with the functions that the first one left."""

from upstream.edits import Repair, before, substitute

_SETUP = "swift.megatron.trainers.base:BaseMegatronTrainer.setup_model_training"

REPAIR = Repair(
    edits=(
        before(
            _SETUP,
            "assert config.no_sync_func is None",
            """
            # An earlier training of this trainer leaves its own no_sync.
            if config.no_sync_func in (self.wrapped_models[0].no_sync, [m.no_sync for m in self.wrapped_models]):
                config.no_sync_func = None
            """,  # noqa: E501
        ),
        substitute(
            _SETUP,
            "self._saved_param_sync_func = config.param_sync_func",
            "self._saved_param_sync_func = "
            "config.param_sync_func or getattr(self, '_saved_param_sync_func', None)",
        ),
    ),
)
