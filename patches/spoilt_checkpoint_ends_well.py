"""A checkpoint that cannot be read ends the program with status 0, as if it had trained to its end.

Symptom:
    A file of `--ckpt-format torch` is cut. One rank prints "could not load the checkpoint" and
    exits with status 0, so that a launcher takes the job for done; the others wait for it. So they
    do where one rank cannot read the tracker file, `latest_checkpointed_iteration.txt`. Or the file
    of the optimizer's state is missing: weights are those of the checkpoint by then, moments and
    main parameters those of the run.

Cause:
    `_load_base_checkpoint` and `load_checkpoint` end in `sys.exit()`, which has no status, wherever
    something cannot be read, and so does `read_metadata`, which has a collective after it has read
    the tracker file. The optimizer's file is opened after weights are loaded.

Affects:
    Every release. Releases before 0.17 carry `megatron.training` in a source checkout only. What
    the patch does: such an exit is a `RuntimeError` with the reason, on all ranks. Ranks tell each
    other whether they can read the tracker file before they compare what it says. Before a rank
    loads weights it looks whether the optimizer's file is whole. `--exit-on-missing-checkpoint`
    ends with status 0 as before. A rank that sees no tracker file still starts afresh.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/checkpointing.py,
    `_load_base_checkpoint`, at "could not load the checkpoint"; no thread found.

Remove when:
    `load_checkpoint` raises what it has met, or exits with another status than 0.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, arguments, program, shared_folder, target
from ._checkpoints import PART, UNCHANGED


def load_checkpoint(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Load on all ranks, or raise on all of them."""
    from megatron.training import get_args

    from megatron_idempotent.window import agreement

    with agreement.as_one(PART):
        try:
            return original(*args, **kwargs)
        except SystemExit as left:
            if left.code or getattr(get_args(), "exit_on_missing_checkpoint", False):
                raise
            why = left.__context__
            said = "see above" if why is None else agreement.describe(why)
            raise RuntimeError(f"the checkpoint cannot be loaded: {said}") from why


def read_metadata(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Read the tracker file, if all ranks can."""
    from megatron.training import checkpointing

    from megatron_idempotent.window import agreement

    name = arguments(original, args, kwargs)["tracker_filename"]
    # Both of upstream's read in a cloud, too.
    has = vars(checkpointing)
    opened = has.get("open_file") or has["maybe_msc"].open
    with agreement.as_one(UNCHANGED):
        with agreement.attempt(UNCHANGED):
            with opened(name, "r") as file:
                said = file.read().strip()
            if said != "release" and not said.isdecimal():
                raise ValueError(f"{name} has {said!r}: write the iteration to load into it")
        return original(*args, **kwargs)


def load_base_checkpoint(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Read the checkpoint, and look at the optimizer's file before anything is loaded."""
    from megatron.training import checkpointing

    from megatron_idempotent.window import agreement

    loaded = original(*args, **kwargs)
    _, checkpoint_name, release, ckpt_type = loaded
    call = arguments(original, args, kwargs)
    if ckpt_type is checkpointing.CheckpointType.LEGACY and not call["rank0"]:
        with agreement.attempt(UNCHANGED):
            if not release:  # it has no state of an optimizer
                _look_at_optimizer(call["args"], checkpoint_name)
    return loaded


def _look_at_optimizer(options: Any, name: str) -> None:
    """Raise unless the optimizer's file, if this rank will read it, is there and whole."""
    import zipfile

    from megatron.core import parallel_state
    from megatron.training import checkpointing

    reads = not (
        parallel_state.get_data_parallel_rank(with_context_parallel=True)
        and parallel_state.get_expert_data_parallel_rank()
    )
    wanted = options.use_distributed_optimizer and not (
        options.no_load_optim or getattr(options, "finetune", False)
    )
    if not (reads and wanted):
        return
    path = checkpointing.get_distributed_optimizer_checkpoint_name(name)
    with open(path, "rb") as file:
        if file.read(2) == b"PK" and not zipfile.is_zipfile(file):
            raise ValueError(f"{path} is cut: the end of its archive is missing")


def _save_and_move(running: Any) -> list[Any]:
    """Train, save, and move all weights; return what a load takes."""
    from megatron.training import checkpointing

    whole = [running.chunks, running.optimizer, running.scheduler]
    running.args.save = running.args.load = shared_folder()
    running.train(1)
    checkpointing.save_checkpoint(1, *whole, 0)
    for chunk in running.chunks:
        chunk.requires_grad_(False)
        for parameter in chunk.parameters():
            parameter.add_(1)
    return whole


def reproduce() -> None:
    """Cut the optimizer's file, that of the weights, and one rank's tracker file; load each."""
    import os
    import shutil
    import tempfile
    from pathlib import Path

    import torch
    from megatron.training import checkpointing

    running = program(["--bf16", "--ckpt-format", "torch"])
    whole, rank = _save_and_move(running), torch.distributed.get_rank()
    before = running.parameters()
    for name in ("distrib_optim.pt", "model_optim_rng.pt", "latest*.txt"):
        if name == "latest*.txt" and rank == 1:  # that of its own machine
            running.args.load = shutil.copytree(running.args.load, tempfile.mkdtemp() + "/own")
        torch.distributed.barrier()
        if rank == (name == "latest*.txt"):
            (path,) = Path(running.args.load).rglob(name)
            os.truncate(path, path.stat().st_size // 2)
        torch.distributed.barrier()
        try:
            checkpointing.load_checkpoint(*whole)
        except RuntimeError as error:
            raised = str(error)
        except SystemExit as left:
            raise Fault(f"{name} is cut, and the program ends with {left.code}") from left
        if not running.parameters().equal(before):
            raise Fault(f"{name} is cut, and weights are loaded; said was {raised}")


def neighbour() -> object:
    """Load whole weights over others that have moved."""
    from megatron.training import checkpointing

    running = program(["--ckpt-format", "torch", "--no-save-optim", "--no-load-optim"])
    checkpointing.load_checkpoint(*_save_and_move(running))
    return running.parameters().numpy().tobytes()


PATCH = Patch(
    "a checkpoint that cannot be read ends the program with status 0",
    target("checkpointing.load_checkpoint", load_checkpoint, "sys.exit()"),
    target("checkpointing._load_base_checkpoint", load_base_checkpoint, "sys.exit()"),
    target("checkpointing.read_metadata", read_metadata, "torch.distributed.all_reduce"),
    given=("reshardable-load-wants-step",),
)
