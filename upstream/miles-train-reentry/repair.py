"""miles's `train()` accepts its own `no_sync`, and restores sync function and garbage collector."""

from upstream.edits import Repair, after, replace, substitute, wrap

_TRAIN = "miles.backends.megatron_utils.model:train"

REPAIR = Repair(
    edits=(
        substitute(
            _TRAIN,
            "config.no_sync_func is None",
            "config.no_sync_func in "
            "(None, model[0].no_sync, [model_chunk.no_sync for model_chunk in model])",
        ),
        substitute(_TRAIN, "        param_sync_func = config.param_sync_func\n", ""),
        replace(_TRAIN, "config.param_sync_func = None", ""),
        replace(_TRAIN, "config.param_sync_func = param_sync_func", ""),
        wrap(
            _TRAIN,
            "train_one_step(",
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
        after(
            _TRAIN,
            "if pre_hook_enabled",
            """

            # Automatic collection is off for this loop only.
            if args.manual_gc:
                gc.enable()
            """,
        ),
    ),
)
