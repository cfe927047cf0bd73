"""Bridge's `train_step` stops its timer and its NVTX range also if the optimizer raises."""

from upstream.edits import Repair, replace, wrap

_STEP = "megatron.bridge.training.train:train_step"

REPAIR = Repair(
    edits=(
        replace(_STEP, 'timers("optimizer").stop()', ""),
        replace(_STEP, 'nvtx_range_pop(suffix="optimizer_step")', ""),
        wrap(
            _STEP,
            "optimizer.step()",
            "try:",
            """
            finally:
                timers("optimizer").stop()
                nvtx_range_pop(suffix="optimizer_step")
            """,
            until="if qk_clip_enabled",
        ),
    ),
    unit_tests=("training/test_train.py",),
)
