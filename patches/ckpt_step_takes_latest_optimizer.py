"""With `--ckpt-step` weights come from that checkpoint, the optimizer's state from the latest one.

Symptom:
    A roll back with `--ckpt-step` and `--ckpt-format torch`: forwards use the weights of that
    iteration, and the first step restores the later weights, because fp32 main parameters and
    Adam's moments come from the latest checkpoint. `load_checkpoint` also returns the later
    iteration. No error. With `--ckpt-step 0` everything comes from the latest checkpoint, in every
    format. If there is a newer non-persistent checkpoint, it is loaded instead of the requested
    step.

Cause:
    `load_checkpoint` reads the tracker file a second time, for the state of the distributed
    optimizer, without looking at `args.ckpt_step`. 0 is taken as "not given". A non-persistent
    checkpoint takes precedence over all older ones.

Affects:
    Every release. Releases before 0.17 carry `megatron.training` in a source checkout only. What
    the patch does: if `args.ckpt_step` is set, reading the tracker file returns this iteration, and
    non-persistent checkpoints of other iterations are ignored.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/checkpointing.py,
    `load_checkpoint`, at "this is a manual read of the tracker file"; no thread found.

Remove when:
    `load_checkpoint` takes the iteration that `_load_base_checkpoint` has loaded.
    `upstream/ckpt-step-takes-latest-optimizer` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, address, program, target


def read_metadata(original: Original, *args: Any, **kwargs: Any) -> tuple[int, bool]:
    """Wrap the read of the tracker file: return `args.ckpt_step` as the iteration, if it is set."""
    import os

    from megatron.training import checkpointing, global_vars

    iteration, release = original(*args, **kwargs)
    (tracker,) = (*args, *kwargs.values())
    options = global_vars._GLOBAL_ARGS  # None while a checkpoint's own arguments are read
    step = getattr(options, "ckpt_step", None)
    folder = os.path.dirname(os.fspath(tracker))
    apart = getattr(options, "non_persistent_global_ckpt_dir", None)
    if (
        step is None
        or folder == apart
        or os.path.basename(folder) == checkpointing._NON_PERSISTENT_CKPT_SUBDIR
    ):
        return iteration, release
    return step, release


def get_non_persistent_iteration(original: Original, folder: Any, args: Any, *context: Any) -> int:
    """Return the latest non-persistent iteration in a folder.
    Return -1 if `args.ckpt_step` is set to another iteration.
    """
    iteration = original(folder, args, *context)
    step = getattr(args, "ckpt_step", None)
    return iteration if step in (None, iteration) else -1


def reproduce() -> None:
    """Save three iterations, and load each of the first two with `ckpt_step`.
    On stock Megatron the load takes the optimizer's state of the latest iteration.
    """
    import tempfile

    from megatron.training import checkpointing

    running = program(["--bf16", "--ckpt-format", "torch"])
    with tempfile.TemporaryDirectory() as folder:
        running.args.save = running.args.load = folder
        saved = [running.chunks, running.optimizer, running.scheduler]
        running.train(1)
        for iteration in range(3):
            checkpointing.save_checkpoint(iteration, *saved, 0)
        for step in (1, 0):
            running.args.ckpt_step = step
            iteration = running.load()
            if iteration != step:
                raise Fault(
                    f"went back to iteration {step}, and the optimizer's state is {iteration}'s"
                )


PATCH = Patch(
    "a load with ckpt_step takes the optimizer's state of the latest checkpoint",
    target("checkpointing.read_metadata", read_metadata, "tracker_filename"),
    target(
        "checkpointing._get_non_persistent_iteration",
        get_non_persistent_iteration,
        "args.non_persistent_ckpt_type is None",
    ),
    ranks=1,
    given=("reshardable-load-wants-step",),
    fixed_by=(
        (address("checkpointing._load_base_checkpoint"), "non_persistent_iteration != iteration"),
    ),
)
