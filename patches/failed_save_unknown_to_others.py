"""A save that one rank cannot write leaves the others waiting.

Symptom:
    With `--ckpt-format torch` the disk is full, or a folder cannot be created. The rank that writes
    raises `OSError`, and the others wait for it until their collective's timeout. With any format
    the same happens if rank 0 cannot write the tracker file, `latest_checkpointed_iteration.txt`.

Cause:
    `save_checkpoint` writes on one rank of each model-parallel group, then calls a barrier, which a
    failed rank never enters. Rank 0 writes the tracker file between this barrier and the next.

Affects:
    Every release. Releases before 0.17 carry `megatron.training` in a source checkout only. What
    the patch does: at these barriers, and at the end, ranks exchange failures; if one has failed,
    all raise. The tracker file still names the previous checkpoint. All ranks must call the save,
    as upstream's own barrier requires. Not covered: with `--ckpt-format torch` and the distributed
    optimizer, a rank that cannot create the optimizer's folder while its data-parallel peers can;
    they wait for it in the gather of the optimizer's state until the timeout.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/checkpointing.py,
    `save_checkpoint`, at "Wait so everyone is done (necessary)"; no thread found.

Remove when:
    `save_checkpoint` raises on all ranks if one cannot write.
    `upstream/failed-save-unknown-to-others` has the repair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _checkpoints
from ._case import Fault, Patch, program, shared_folder, target

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_idempotent.patching.source import Body


def reproduce() -> None:
    """Save to a path at which rank 0 finds a file in place of a folder.
    On stock Megatron rank 0 raises, and rank 1 waits in two barriers.
    """
    from pathlib import Path

    import torch
    from megatron.training import checkpointing

    running = program(["--ckpt-format", "torch", "--no-save-optim"])
    running.args.save = shared_folder()
    Path(running.args.save, "iter_0000001").touch()
    try:
        checkpointing.save_checkpoint(1, running.chunks, None, None, 0)
    except (OSError, RuntimeError):
        for _ in range(2):  # on stock the other rank waits in two barriers
            torch.distributed.barrier()
    else:
        rank = torch.distributed.get_rank()
        raise Fault(f"rank 0 could not write, and rank {rank} waited for it")


def control() -> object:
    """Save and load without a failure, as a control; return the loaded iteration."""
    from megatron.training import checkpointing

    running = program(["--ckpt-format", "torch", "--no-save-optim", "--no-load-optim"])
    running.args.save = running.args.load = shared_folder()
    checkpointing.save_checkpoint(3, running.chunks, None, None, 0)
    return checkpointing.load_checkpoint(running.chunks, None, None)[0]


def _repaired(bodies: Mapping[str, Body]) -> bool:
    """Tell if ranks report to all ranks that they could not write weights or the tracker file."""
    (body,) = bodies.values()
    writes = ("torch.save", "iter_finalize_fn")
    return all(_checkpoints.reports_failures(body, function) for function in writes)


PATCH = Patch(
    "a save that one rank cannot write leaves the others waiting",
    target("checkpointing.save_checkpoint", _checkpoints.save, "torch.distributed.barrier()"),
    fixed_when=_repaired,
    loudness="loud",
)
