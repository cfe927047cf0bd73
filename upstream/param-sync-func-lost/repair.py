"""`train()` unsets `config.param_sync_func` only while a step runs, and always restores it."""

from upstream.edits import Repair, replace, wrap

_TRAIN = "megatron.training.training:train"

REPAIR = Repair(
    edits=(
        replace(_TRAIN, "param_sync_func = config.param_sync_func", ""),
        replace(_TRAIN, "config.param_sync_func = None", ""),
        replace(_TRAIN, "config.param_sync_func = param_sync_func", ""),
        wrap(
            _TRAIN,
            "with _first_iter_span_cm",
            """
            # Sync calls made in `forward_backward_func` are no-ops until the pre-hook is enabled.
            param_sync_func = config.param_sync_func
            if should_disable_forward_pre_hook(args) and not pre_hook_enabled:
                config.param_sync_func = None
            try:
            """,
            """
            finally:
                config.param_sync_func = param_sync_func
            """,
        ),
    ),
    unit_tests=("test_training.py", "training/test_train_step_schedule_plumbing.py"),
)
