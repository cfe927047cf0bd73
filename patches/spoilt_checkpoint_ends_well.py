"""A checkpoint that cannot be read ends the program with status 0, as after complete training.

Symptom:
    A file of `--ckpt-format torch` is truncated. One rank prints "could not load the checkpoint"
    and exits with status 0, so that a launcher takes the job for done; the others wait for it. The
    same happens if one rank cannot read the tracker file, `latest_checkpointed_iteration.txt`. Or
    the file of the optimizer's state is missing: then the weights are already those of the
    checkpoint, moments and main parameters those of the run.

Cause:
    `_load_base_checkpoint` and `load_checkpoint` call `sys.exit()` without a status if a file
    cannot be read, and so does `read_metadata`, which calls a collective after it has read the
    tracker file. The optimizer's file is opened after weights are loaded.

Affects:
    Every release. Releases before 0.17 carry `megatron.training` in a source checkout only. What
    the patch does: such an exit becomes a `RuntimeError` with the reason, on all ranks. Ranks
    exchange whether they can read the tracker file before they compare its contents. Before a rank
    loads weights it checks that the optimizer's file is complete. `--exit-on-missing-checkpoint`
    ends with status 0 as before. A rank that sees no tracker file still starts from scratch.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/checkpointing.py,
    `_load_base_checkpoint`, at "could not load the checkpoint"; no thread found.

Remove when:
    `load_checkpoint` raises the error, or exits with a status other than 0.
    `upstream/spoilt-checkpoint-ends-well` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, arguments, program, shared_folder, target
from ._checkpoints import PART, UNCHANGED


def load_checkpoint(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap a load: if one rank raises, or exits with status 0, raise an error on all ranks."""
    from megatron.training import get_args

    from megatron_idempotent.window import agreement

    with agreement.as_one(PART):
        try:
            return original(*args, **kwargs)
        except SystemExit as ended:
            if ended.code or getattr(get_args(), "exit_on_missing_checkpoint", False):
                raise
            cause = ended.__context__
            reason = "see above" if cause is None else agreement.describe(cause)
            raise RuntimeError(f"the checkpoint cannot be loaded: {reason}") from cause


def read_metadata(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap the read of the tracker file: raise on all ranks if one rank cannot read it."""
    from megatron.training import checkpointing

    from megatron_idempotent.window import agreement

    name = arguments(original, args, kwargs)["tracker_filename"]
    # Both of upstream's functions also read cloud storage.
    has = vars(checkpointing)
    opened = has.get("open_file") or has["maybe_msc"].open
    with agreement.as_one(UNCHANGED):
        with agreement.attempt(UNCHANGED):
            with opened(name, "r") as file:
                content = file.read().strip()
            if content != "release" and not content.isdecimal():
                raise ValueError(f"{name} has {content!r}: write the iteration to load into it")
        return original(*args, **kwargs)


def load_base_checkpoint(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap the read of a checkpoint: check the optimizer's file, too, before weights are loaded."""
    from megatron.training import checkpointing

    from megatron_idempotent.window import agreement

    loaded = original(*args, **kwargs)
    _, checkpoint_name, release, ckpt_type = loaded
    call = arguments(original, args, kwargs)
    if ckpt_type is checkpointing.CheckpointType.LEGACY and not call["rank0"]:
        with agreement.attempt(UNCHANGED):
            if not release:  # a release has no optimizer state
                _look_at_optimizer(call["args"], checkpoint_name)
    return loaded


def _look_at_optimizer(options: Any, name: str) -> None:
    """Raise if this rank will read the optimizer's file and the file is missing or truncated."""
    import zipfile

    from megatron.core import parallel_state
    from megatron.training import checkpointing

    reads = not (
        parallel_state.get_data_parallel_rank(with_context_parallel=True)
        and parallel_state.get_expert_data_parallel_rank()
    )
    loads_optimizer = options.use_distributed_optimizer and not (
        options.no_load_optim or getattr(options, "finetune", False)
    )
    if not (reads and loads_optimizer):
        return
    path = checkpointing.get_distributed_optimizer_checkpoint_name(name)
    with open(path, "rb") as file:
        if file.read(2) == b"PK" and not zipfile.is_zipfile(file):
            raise ValueError(f"{path} is truncated: the end of its archive is missing")


def _save_and_move(running: Any) -> None:
    """Train a step, save, and add 1 to all weights, so that a load would change them."""
    from megatron.training import checkpointing

    state = [running.chunks, running.optimizer, running.scheduler]
    running.args.save = running.args.load = shared_folder()
    running.train(1)
    checkpointing.save_checkpoint(1, *state, 0)
    for chunk in running.chunks:
        chunk.requires_grad_(False)
        for parameter in chunk.parameters():
            parameter.add_(1)


def reproduce() -> None:
    """Truncate the optimizer's, the weights' or one rank's tracker file; load after each.
    On stock Megatron the program exits with status 0, or weights are loaded.
    """
    import os
    import shutil
    import tempfile
    from pathlib import Path

    import torch

    running = program(["--bf16", "--ckpt-format", "torch"])
    _save_and_move(running)
    rank = torch.distributed.get_rank()
    parameters = running.parameters()
    for name in ("distrib_optim.pt", "model_optim_rng.pt", "latest*.txt"):
        if name == "latest*.txt" and rank == 1:  # as on its own machine
            running.args.load = shutil.copytree(running.args.load, tempfile.mkdtemp() + "/own")
        torch.distributed.barrier()
        if rank == (name == "latest*.txt"):
            (path,) = Path(running.args.load).rglob(name)
            os.truncate(path, path.stat().st_size // 2)
        torch.distributed.barrier()
        try:
            running.load()
        except RuntimeError as error:
            raised = str(error)
        except SystemExit as left:
            raise Fault(f"{name} is truncated, and the program ends with {left.code}") from left
        if not running.parameters().equal(parameters):
            raise Fault(f"{name} is truncated, and weights are loaded; the error was {raised}")


def control() -> object:
    """Load a complete checkpoint over changed weights, as a control; return the weights' bytes."""
    running = program(["--ckpt-format", "torch", "--no-save-optim", "--no-load-optim"])
    _save_and_move(running)
    running.load()
    return running.parameters().numpy().tobytes()


PATCH = Patch(
    "a checkpoint that cannot be read ends the program with status 0",
    target("checkpointing.load_checkpoint", load_checkpoint, "sys.exit()"),
    target("checkpointing._load_base_checkpoint", load_base_checkpoint, "sys.exit()"),
    target("checkpointing.read_metadata", read_metadata, "torch.distributed.all_reduce"),
    given=("reshardable-load-wants-step",),
    loudness="both",
)
