"""Bridge's setup accepts the `no_sync_func` that an earlier setup installed in the same config."""

from upstream.edits import Repair, before, substitute

_WIRE = "megatron.bridge.training.setup:_update_model_config_funcs"

REPAIR = Repair(
    edits=(
        before(
            _WIRE,
            "assert model_config.no_sync_func is None",
            """
            # An earlier setup with this config installed no_sync of its own model chunks.
            no_sync = model_config.no_sync_func
            no_sync = no_sync[0] if isinstance(no_sync, list) else no_sync
            """,
        ),
        substitute(
            _WIRE,
            "model_config.no_sync_func is None",
            'no_sync is None or getattr(no_sync, "__func__", None) is type(model[0]).no_sync',
        ),
    ),
    unit_tests=("training/test_setup.py",),
)
