"""A `torch_dist` save that fails on rank 0 leaves the others waiting.

Symptom:
    The disk is full, a quota is exceeded, or the folder does not exist. Rank 0 raises, and the
    others wait for it until their collective's timeout, in `dist_checkpointing.save` or, if the
    save is asynchronous, while it is finalized. Write errors of other ranks are reported to all
    ranks, except in 0.13, where rank 0 waits for these ranks.

Cause:
    Rank 0 does four things alone that may fail, while the others go on to the next collective: it
    checks the folder; until 0.18 it writes `common.pt` (`save_common`), whose contents 0.19 saves
    with the tensors; it writes `.metadata` (`save_state_dict_async_finalize`), while the others
    wait for the result of writing the tensors; and it writes `metadata.json`.

Affects:
    0.13 and later. What the patch does: before each of these collectives ranks exchange failures;
    if one has failed, all raise. `.metadata` is written after all ranks know that the tensors are
    written. This costs seven collectives of a few bytes per save. All ranks must call the save, as
    upstream's own barrier requires. A queue of `nvidia-resiliency-ext` finalizes as before.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.18.0/megatron/core/dist_checkpointing/serialization.py,
    `save`, at `save_common`; no thread found.

Remove when:
    `save` raises on all ranks if rank 0 cannot write.
    `upstream/failed-dist-save-hangs` has the repair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._case import Fault, Original, Patch, address, shared_folder, target
from ._checkpoints import NOT_SAVED, reports_failures, save

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from megatron_idempotent.patching.source import Body


def meet(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap a function of the save that starts collectives. Before it runs, ranks exchange whether
    one of them has failed in this save: if so, all ranks raise; otherwise the function runs.
    """
    from megatron_idempotent.window import agreement

    agreement.meet(NOT_SAVED)
    return original(*args, **kwargs)


def save_state_dict_async_finalize(
    original: Original, storage_writer: Any, *args: Any, **kwargs: Any
) -> None:
    """Write the metadata of a save after all ranks have written; raise on all if one fails."""
    from megatron_idempotent.window import agreement

    retrieve = storage_writer.retrieve_write_results
    finish, calls = storage_writer.finish, []

    def met_with_results() -> Any:
        results = retrieve()  # 0.13 raises here, on the rank that has not written
        agreement.meet(NOT_SAVED)
        return results

    storage_writer.retrieve_write_results = met_with_results
    storage_writer.finish = lambda *args, **kwargs: calls.append((args, kwargs))
    with agreement.as_one(NOT_SAVED):
        try:
            original(storage_writer, *args, **kwargs)
        finally:
            del storage_writer.retrieve_write_results, storage_writer.finish
        with agreement.attempt(NOT_SAVED):
            for finish_args, finish_kwargs in calls:
                finish(*finish_args, **finish_kwargs)


def schedule_async_request(original: Original, self: Any, async_request: Any) -> Any:
    """Wrap the start of an asynchronous save: its finalize functions raise on all ranks or none."""
    functions = async_request.finalize_fns
    functions[:] = [functools.partial(_finalize, list(functions))]
    return original(self, async_request)


def _finalize(functions: list[Callable[[], None]]) -> None:
    from megatron_idempotent.window import agreement

    with agreement.as_one_at_barriers(NOT_SAVED):
        for function in functions:
            function()


def _state(value: float) -> dict[str, Any]:
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor

    weight, rank = torch.full((64,), value), torch.distributed.get_rank()
    return {"weight": ShardedTensor.from_rank_offsets("weight", weight, (0, rank, 2)), "step": 1}


def _join(path: Path, folder: Path) -> None:
    """Enter, after a save that raised, the collectives in which, on stock Megatron, the other rank
    waits, so that the test does not hang. `path` is the file or folder that rank 0 could not write.
    """
    import torch
    from megatron.core import dist_checkpointing

    rank = torch.distributed.get_rank()
    if path == folder:
        if rank == 0:
            folder.mkdir()
        dist_checkpointing.save(_state(1.0), str(folder))
    elif path.name == "common.pt":
        if rank == 0:
            path.rmdir()
        dist_checkpointing.save(_state(1.0), str(folder), validate_access_integrity=False)
    else:
        if path.name == ".metadata":
            torch.distributed.broadcast(torch.zeros(1, dtype=torch.int, device="cuda"), 0)
        torch.distributed.barrier()


def reproduce() -> None:
    """Save once for each way in which rank 0 cannot write, and check that both ranks raise.
    The checkpoint's folder is missing, or a folder has the name of a file that rank 0 writes. On
    stock Megatron rank 0 raises, and rank 1 waits for it.
    """
    from pathlib import Path

    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception

    rank = torch.distributed.get_rank()
    for name in ("", "common.pt", ".metadata", "metadata.json"):
        folder, failed = Path(shared_folder()), [False, False]
        path, raised = folder / name, False
        if rank == 0:
            (path.mkdir if name else path.rmdir)()
        torch.distributed.barrier()
        try:
            dist_checkpointing.save(_state(1.0), str(folder))
        except (OSError, RuntimeError, CheckpointingException, CheckpointException):
            raised = True
            _join(path, folder)
        torch.distributed.all_gather_object(failed, raised)
        if failed[0] != failed[1]:
            raise Fault(f"rank 0 could not write {name or 'a folder'}, and rank 1 waited for it")


def control() -> object:
    """Save synchronously and asynchronously, and load, as a control; return the loaded values."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from megatron_idempotent.megatron.layer_specs import takes

    folder, later = shared_folder(), shared_folder()
    dist_checkpointing.save(_state(1.0), folder)
    queue = AsyncCallsQueue()
    options: dict[str, Any] = {"async_sharded_save": True}
    if takes(dist_checkpointing.save, "async_strategy"):
        options["async_strategy"] = "mcore"
    queue.schedule_async_request(dist_checkpointing.save(_state(2.0), later, **options))
    queue.maybe_finalize_async_calls(blocking=True)
    states = [dist_checkpointing.load(_state(0.0), path) for path in (folder, later)]
    return [str(state["step"]) + str(state["weight"].tolist()) for state in states]


_STRATEGIES = "core.dist_checkpointing.strategies"
_SAVE = "core.dist_checkpointing.serialization:save"
_FINALIZE = f"{_STRATEGIES}.state_dict_saver:save_state_dict_async_finalize"


def _repaired(bodies: Mapping[str, Body]) -> bool:
    """Tell if all ranks learn it when rank 0 cannot write `.metadata` or `metadata.json`."""
    return reports_failures(bodies[address(_FINALIZE)], "finish") and reports_failures(
        bodies[address(_SAVE)], "save_config"
    )


PATCH = Patch(
    "a torch_dist save that fails on rank 0 leaves the others waiting",
    target(_SAVE, save, "torch.distributed.barrier()"),
    target(
        "core.dist_checkpointing.state_dict_utils:save_preprocess",
        meet,
        "determine_global_metadata(sharded_part)",
    ),
    target(
        f"{_STRATEGIES}.fully_parallel:FullyParallelSaveStrategyWrapper.apply_saving_parallelization",
        meet,
        "determine_main_replica_uniform_distribution",
    ),
    target(f"{_STRATEGIES}.state_dict_saver:save_state_dict_async_plan", meet),
    target(
        _FINALIZE,
        save_state_dict_async_finalize,
        "storage_writer.finish(global_metadata, all_results)",
    ),
    target(
        f"{_STRATEGIES}.async_utils:AsyncCallsQueue.schedule_async_request",
        schedule_async_request,
        "async_request.freeze()",
    ),
    since="0.13",
    fixed_when=_repaired,
    needs=("psutil",),
    loudness="loud",
)
