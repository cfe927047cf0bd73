"""Saves and loads a run: Megatron's distributed checkpoint, and the number of completed rollouts.

An asynchronous run's checkpoint also has the controller's state, and is complete only with both.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# Imported by name: if a function refers to `torch.distributed` and to a name `config`, cloudpickle
# tries to pickle the module `torch.distributed.config`, and fails.
from torch.distributed import all_gather_object, barrier, get_rank, get_world_size

from megatron_idempotent.json_text import JsonError, parse_json
from megatron_idempotent.rl.workers import RankGroup

from . import CheckpointError, output
from .megatron_setup import MegatronModel
from .output import Job
from .policy import MegatronPolicy

_MEGATRON, _CONTROLLER = "megatron", "controller.json"


def save_checkpoint(job: Job, policy: MegatronPolicy, rollouts: int) -> None:
    """Write a checkpoint of the run after `rollouts` rollouts, and remove the oldest checkpoints. A
    collective.

    Megatron's checkpoint has weights, optimizer, schedule and random states. The loop adds only the
    number of rollouts, because prompts, microbatch order and sampling are functions of it and the
    seed. A digest of the weights shows whether two runs are equal.
    """
    directory = job.out / "checkpoints"
    unfinished = output.unfinished_path(directory, rollouts)
    if get_rank() == 0:
        output.make_empty(unfinished)
    barrier()  # no rank may write before the directory is empty
    iteration = rollouts * job.config.optimizer.steps_per_rollout
    digest = save_weights(policy, unfinished / _MEGATRON, iteration=iteration)
    barrier()  # rank 0 then lists the files of all ranks
    if get_rank() == 0:
        output.seal_checkpoint(directory, rollouts, job.config, digest=digest)
    barrier()


def save_weights(policy: MegatronPolicy, directory: Path, *, iteration: int) -> str:
    """Write Megatron's checkpoint of weights, optimizer, schedule and random states; return a
    digest of the entire model's weights. A collective.

    Returns:
        A digest of the entire model's weights: of this rank's chunks if every rank has the entire
        model, otherwise of all ranks' parts. Two runs with the same layout have equal digests if
        and only if their weights are equal bit for bit.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training.checkpointing import save_checkpoint as save

    stock = policy.stock
    # A synchronous save needs no results queue. Megatron would create one in another process, which
    # imports Megatron and delays the first save by some ten seconds.
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
    with policy.weights() as modules:
        with _argument(stock.args, "save", str(directory)):
            save(
                iteration,
                stock.chunks,
                stock.optimizer,
                stock.scheduler,
                num_floating_point_operations_so_far=0,  # not counted
            )
        digest = weights_digest(modules)
    if policy.config.parallel.is_whole:
        return digest
    parts = [""] * get_world_size()
    all_gather_object(parts, digest)
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def load_weights(stock: MegatronModel, directory: Path) -> int:
    """Load a checkpoint that `save_weights` wrote into model, optimizer and scheduler; return its
    iteration. A collective.
    """
    from megatron.training.checkpointing import load_checkpoint

    # no_grad: the optimizer copies into views of float32 parameters, which are leaves here.
    with _argument(stock.args, "load", str(directory)), torch.no_grad():
        iteration, _ = load_checkpoint(stock.chunks, stock.optimizer, stock.scheduler)
    loaded: int = iteration
    return loaded


def weights_digest(modules: Sequence[torch.nn.Module]) -> str:
    """Return the SHA-256 over the names and bits of all parameters: module after module, and within
    a module in order of name.
    """
    digest = hashlib.sha256()
    for module in modules:
        for name, parameter in sorted(module.named_parameters()):
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _argument(args: Any, name: str, value: str) -> Iterator[None]:
    """Set one of Megatron's global arguments to `value` within a block; restore the old value after
    the block.
    """
    old_value = getattr(args, name)
    setattr(args, name, value)
    try:
        yield
    finally:
        setattr(args, name, old_value)


class CheckpointStore:
    """Implements `controller.Store` for a run on ranks; verifies a checkpoint before reading it.

    Example: `state = await CheckpointStore(job, ranks).restore()`.
    """

    def __init__(self, job: Job, ranks: RankGroup) -> None:
        self._directory = job.out / "checkpoints"
        self._config = job.config
        self._ranks = ranks
        # A resumed run has just started its ranks, which need no restart.
        self._fresh = job.resume_from is not None

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint of the ranks' weights and of the controller's state, hashing its files
        in a thread; see `controller.Store.save`.
        """
        unfinished = output.unfinished_path(self._directory, version)
        await asyncio.to_thread(output.make_empty, unfinished)
        digest, *_ = await self._call("save", str(unfinished / _MEGATRON), version)

        def seal() -> None:
            (unfinished / _CONTROLLER).write_text(json.dumps(state), encoding="utf-8")
            output.seal_checkpoint(self._directory, version, self._config, digest=digest)

        await asyncio.to_thread(seal)

    async def restore(self) -> Mapping[str, Any] | None:
        """Restart all ranks, and load the newest complete checkpoint; return the controller's state
        in the checkpoint, or None if there is none. The first call in a resumed run does not
        restart the ranks, because they have just started. See `controller.Store.restore`.

        Raises:
            CheckpointError: the checkpoint is damaged.
            RanksLost: ranks cannot be started, or died.
        """
        checkpoints = output.complete_checkpoints(self._directory)
        state: Mapping[str, Any] | None = None
        if checkpoints:
            await asyncio.to_thread(output.verify_checkpoint, checkpoints[-1])
            path = checkpoints[-1] / _CONTROLLER
            try:
                state = parse_json(path.read_bytes())
            except (OSError, JsonError) as error:
                raise CheckpointError(f"{path}: {error}; remove the checkpoint") from error
        if not self._fresh:
            await self._ranks.start()
        self._fresh = False
        if state is not None:
            await self._call("load", str(checkpoints[-1] / _MEGATRON))
        return state

    async def _call(self, method: str, *args: Any) -> list[Any]:
        # With a limit: if one rank fails, the others hang in a collective.
        limit_s = self._config.controller.call_timeout_s
        return await self._ranks.call(method, *args, timeout_s=limit_s)
