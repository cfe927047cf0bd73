"""Bridge's `train()` starts its timer again, and restores sync function and garbage collector."""

from upstream.edits import Repair, after, replace, wrap

_TRAIN = "megatron.bridge.training.train:train"

REPAIR = Repair(
    edits=(
        after(
            _TRAIN,
            "num_floating_point_operations_since_last_log_event = 0.0",
            """

            # An earlier call of train() leaves this timer running.
            timers("interval-time", log_level=0).reset()
            """,
        ),
        replace(_TRAIN, "param_sync_func = model_config.param_sync_func", ""),
        replace(_TRAIN, "model_config.param_sync_func = None", ""),
        replace(_TRAIN, "model_config.param_sync_func = param_sync_func", ""),
        wrap(
            _TRAIN,
            "wrapped_train_step(",
            """
            # Sync calls made in `forward_backward_func` are no-ops until the pre-hook is enabled.
            param_sync_func = model_config.param_sync_func
            if should_toggle_forward_pre_hook and not pre_hook_enabled:
                model_config.param_sync_func = None
            try:
            """,
            """
            finally:
                model_config.param_sync_func = param_sync_func
            """,
        ),
        after(
            _TRAIN,
            "if pre_hook_enabled",
            """

            # Automatic collection is off for this loop only.
            if train_config.manual_gc:
                gc.enable()
            """,
        ),
    ),
    unit_tests=("training/test_train.py",),
)
