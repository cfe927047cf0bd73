"""After a roll back a save deletes the checkpoint that the tracker names, before it writes another.

Symptom:
    There are non-persistent checkpoints (`--non-persistent-ckpt-type global`) 32 and 40, and the
    run was rolled back to 32. The save of 34 removes 32 and keeps 40. If it is interrupted, the
    tracker file names a deleted folder, and the run cannot be started again.

Cause:
    `cleanup_old_non_persistent_checkpoint` keeps the highest iteration, not the one in the tracker
    file.

Affects:
    Every release. Releases before 0.17 carry `megatron.training` in a source checkout only. What
    the patch does: it keeps the folder that the tracker file names, and all folders with a higher
    iteration. So it also keeps the folder of an unfinished asynchronous save, and those of the
    abandoned branch until the run passes them.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/checkpointing.py,
    `cleanup_old_non_persistent_checkpoint`; no thread found.

Remove when:
    the function keeps the folder that the tracker file names. `upstream/tracked-checkpoint-deleted`
    has the repair.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ._case import Fault, Original, Patch, address, target


def cleanup(
    original: Original, save_dir: Any, leave_ckpt_num: int = 1, do_async: bool = False
) -> None:
    """Wrap the removal of old checkpoints: keep the one that the tracker names, and later ones."""
    from megatron.training import checkpointing

    tracker = Path(checkpointing.get_checkpoint_tracker_filename(save_dir))
    iteration = tracker.read_text("utf-8").strip() if tracker.is_file() else ""
    if iteration.isdecimal():
        numbers = [path.name.removeprefix("iter_") for path in Path(save_dir).rglob("iter_*")]
        needed = sum(number.isdecimal() and int(number) >= int(iteration) for number in numbers)
        leave_ckpt_num = max(leave_ckpt_num, needed)
    original(save_dir, leave_ckpt_num=leave_ckpt_num, do_async=do_async)


def reproduce() -> None:
    """Remove old checkpoints while the tracker file names the lower of the last two iterations.
    On stock Megatron that checkpoint is deleted.
    """
    import tempfile

    from megatron.training import checkpointing

    with tempfile.TemporaryDirectory() as folder:
        for number in (30, 32, 40):
            Path(folder, f"iter_{number:07}").mkdir()
        Path(checkpointing.get_checkpoint_tracker_filename(folder)).write_text("32")
        checkpointing.cleanup_old_non_persistent_checkpoint(folder)
        remaining = sorted(path.name for path in Path(folder).glob("iter_*"))
    if "iter_0000032" not in remaining:
        raise Fault(f"the tracker file names 32, and {remaining} remain")
    if "iter_0000030" in remaining:
        raise AssertionError("an older checkpoint is left")


PATCH = Patch(
    "a non-persistent save after a roll back deletes the checkpoint in force",
    target(
        "checkpointing.cleanup_old_non_persistent_checkpoint",
        cleanup,
        "sorted_iter_ckpts[:-leave_ckpt_num]",
    ),
    ranks=1,
    loudness="both",
    fixed_by=(
        (
            address("checkpointing.cleanup_old_non_persistent_checkpoint"),
            "leave_ckpt_num = max(leave_ckpt_num, needed)",
        ),
    ),
)
