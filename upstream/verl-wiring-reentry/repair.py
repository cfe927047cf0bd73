"""verl accepts the `no_sync_func` that it has installed itself, for the same model chunks."""

from upstream.edits import Repair, substitute

REPAIR = Repair(
    edits=(
        substitute(
            "verl.utils.megatron_utils:register_megatron_training_hooks",
            "config.no_sync_func is None",
            "config.no_sync_func in "
            "(None, model[0].no_sync, [model_chunk.no_sync for model_chunk in model])",
        ),
    ),
)
