"""`train()` turns garbage collection on again after its loop if it was on before."""

from upstream.edits import Repair, after, before

_TRAIN = "megatron.training.training:train"

REPAIR = Repair(
    edits=(
        before(_TRAIN, "gc.disable()", "gc_was_enabled = gc.isenabled()"),
        after(
            _TRAIN,
            "if pre_hook_enabled",
            """

            # Leave garbage collection as it was found.
            if args.manual_gc and gc_was_enabled:
                gc.enable()
            """,
        ),
    ),
    unit_tests=("test_training.py",),
)
