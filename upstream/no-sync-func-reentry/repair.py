"""`train()` accepts the `no_sync_func` that an earlier call of it installed for the same model."""

from upstream.edits import Repair, substitute

REPAIR = Repair(
    edits=(
        substitute(
            "megatron.training.training:train",
            "config.no_sync_func is None",
            """config.no_sync_func in (
            None,
            model[0].no_sync,
            [chunk.no_sync for chunk in model],
        )""",
        ),
    ),
    unit_tests=("test_training.py",),
)
