"""Saves and loads a run: Megatron's distributed checkpoint, and the number of rollouts done.

An asynchronous run's checkpoint has the controller's state too, and is complete only with both.
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
import torch.distributed as dist

from megatron_idempotent.rl.workers import RankGroup

from . import checkpoint_dir
from .config import CheckpointError, Config
from .megatron_setup import MegatronModel
from .output import Job, seal_checkpoint
from .policy import MegatronPolicy


class PolicyCheckpoints:
    """Writes and loads the checkpoints of a synchronous run. Both methods are collective.

    Weights, optimizer, schedule and Megatron's random states are in Megatron's own checkpoint. The
    loop adds only the number of rollouts: prompts, microbatch order and sampling are functions of
    it and of the seed. A digest of the weights shows whether two runs are equal.
    Example: `first = checkpoints.load(path)`.
    """

    def __init__(self, directory: Path, config: Config, policy: MegatronPolicy) -> None:
        self._directory = directory
        self._config = config
        self._policy = policy

    def save(self, done: int) -> None:
        """Write the checkpoint after `done` rollouts, then remove the oldest ones."""
        unfinished = checkpoint_dir.unfinished_path(self._directory, done)
        if dist.get_rank() == 0:
            checkpoint_dir.make_empty(unfinished)
        dist.barrier()  # no rank may write before the directory is empty
        iteration = done * self._config.optimizer.steps_per_rollout
        with self._policy.weights() as modules:
            save_weights(self._policy.stock, unfinished / "megatron", iteration=iteration)
            digest = run_digest(modules, self._config)
        dist.barrier()  # rank 0 lists the files of all ranks
        if dist.get_rank() == 0:
            seal_checkpoint(self._directory, done, self._config, digest=digest)
        dist.barrier()

    def load(self, checkpoint: Path) -> int:
        """Load a checkpoint into the policy; return the number of rollouts before it.

        It does not verify the files: the launching process has done so.
        """
        iteration = load_weights(self._policy.stock, checkpoint / "megatron")
        return iteration // self._config.optimizer.steps_per_rollout


def save_weights(stock: MegatronModel, directory: Path, *, iteration: int) -> None:
    """Write Megatron's checkpoint of weights, optimizer, schedule and random states. Collective.

    Call it within `MegatronPolicy.weights`, so that parameters are up to date.
    """
    from megatron.training.checkpointing import save_checkpoint

    _collect_results_in_this_process()
    with _argument(stock.args, "save", str(directory)):
        save_checkpoint(
            iteration,
            stock.chunks,
            stock.optimizer,
            stock.scheduler,
            num_floating_point_operations_so_far=0,  # nobody counts them here
        )


def load_weights(stock: MegatronModel, directory: Path) -> int:
    """Load what `save_weights` wrote; return the iteration it was written with. Collective."""
    from megatron.training.checkpointing import load_checkpoint

    # no_grad: the optimizer copies into views of float32 parameters, which are leaves here.
    with _argument(stock.args, "load", str(directory)), torch.no_grad():
        iteration, _ = load_checkpoint(stock.chunks, stock.optimizer, stock.scheduler)
    found: int = iteration
    return found


def weights_digest(modules: Sequence[torch.nn.Module]) -> str:
    """Return the SHA-256 of all parameters of some chunks, in the order of their names.

    Two digests are equal if and only if names and bits of the parameters are.
    """
    digest = hashlib.sha256()
    for module in modules:
        for name, parameter in sorted(module.named_parameters()):
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def run_digest(modules: Sequence[torch.nn.Module], config: Config) -> str:
    """Return a digest of the whole model's weights. Collective.

    It is that of this rank's chunks if each rank has the whole model, and else of all ranks' parts.
    Two runs of the same layout have equal digests if and only if their weights are bit-equal.
    """
    digest = weights_digest(modules)
    if config.parallel.is_whole:
        return digest
    parts = [""] * dist.get_world_size()
    dist.all_gather_object(parts, digest)
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _collect_results_in_this_process() -> None:
    """Give Megatron's writer a queue in this process, before it makes one in another process.

    A synchronous save writes with threads. The other queue is for asynchronous saves: its process
    imports Megatron, which costs the first save some ten seconds.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


@contextmanager
def _argument(args: Any, name: str, value: str) -> Iterator[None]:
    """Set one of Megatron's global arguments within a block, and restore it afterwards."""
    before = getattr(args, name)
    setattr(args, name, value)
    try:
        yield
    finally:
        setattr(args, name, before)


_MEGATRON, _CONTROLLER = "megatron", "controller.json"


class CheckpointStore:
    """Implements `controller.Store` for a run on ranks; it verifies a checkpoint before reading it.

    Example: `state = await CheckpointStore(job, ranks).restore()`.
    """

    def __init__(self, job: Job, ranks: RankGroup) -> None:
        self._directory = job.out / "checkpoints"
        self._config = job.config
        self._ranks = ranks
        # A run that is resumed has started its ranks right before, and nothing has happened yet.
        self._fresh = job.resume_from is not None

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, hashing its files in a thread; see `controller.Store.save`."""
        unfinished = checkpoint_dir.unfinished_path(self._directory, version)
        await asyncio.to_thread(checkpoint_dir.make_empty, unfinished)
        digests = await self._call("save", str(unfinished / _MEGATRON), version)
        await asyncio.to_thread(self._seal, unfinished, version, state, digests[0])

    async def restore(self) -> Mapping[str, Any] | None:
        """Start fresh ranks and load the newest checkpoint; see `controller.Store.restore`.

        Errors: `CheckpointError` for a damaged checkpoint; `RanksLost`.
        """
        found = checkpoint_dir.complete(self._directory)
        state = await asyncio.to_thread(_read, found[-1]) if found else None
        if not self._fresh:
            await self._ranks.start()
        self._fresh = False
        if state is not None:
            await self._call("load", str(found[-1] / _MEGATRON))
        return state

    async def _call(self, method: str, *args: Any) -> list[Any]:
        # Limited: where one rank fails, the others wait for it in a collective.
        limit_s = self._config.controller.call_timeout_s
        return await self._ranks.call(method, *args, timeout_s=limit_s)

    def _seal(self, unfinished: Path, version: int, state: Mapping[str, Any], digest: str) -> None:
        (unfinished / _CONTROLLER).write_text(json.dumps(state), encoding="utf-8")
        seal_checkpoint(self._directory, version, self._config, digest=digest)


def _read(checkpoint: Path) -> Mapping[str, Any]:
    checkpoint_dir.verify(checkpoint)
    path = checkpoint / _CONTROLLER
    if not path.is_file():
        raise CheckpointError(
            f"{path}: missing, so a run with run.mode = sync has written this checkpoint, and this "
            "run's is async; resume it without --async"
        )
    state: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return state
