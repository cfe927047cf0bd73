"""Adapts Megatron's own ways to save and load a run to the checks of state.

They train with `TrainStep`. `DPReshardable`, `FullyReshardable` and `ModelSpace` call
`megatron.core.dist_checkpointing`, each with a format of the distributed optimizer.
"""

from __future__ import annotations

import multiprocessing
import random
from typing import Any

import numpy
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_idempotent.megatron.layer_specs import takes

from .adapters import SplitStep
from .protocol import Subject

#: What `megatron.training` names beside the format.
_METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


class DistCheckpoint(SplitStep):
    """Saves and loads with `megatron.core.dist_checkpointing`, as `megatron.training` does."""

    keeps = ("scheduler", "random", "loss scale", "expert bias", "counters")
    reshards: tuple[str, ...] = ("dp",)
    sharding: str

    def build(self, subject: Subject) -> None:
        super().build(subject)
        self.iteration = self.saves = 0
        if getattr(filesystem_async, "_results_queue", ()) is None:
            # Forked: upstream's own imports Megatron first, some ten seconds.
            manager = multiprocessing.get_context("fork").Manager()
            filesystem_async._results_queue = manager.Queue()
        # The class of the inner optimizer is in its groups, and so in the checkpoint.
        torch.serialization.add_safe_globals([torch.optim.AdamW])

    def finish(self, **how: Any) -> Any:
        finished = super().finish(**how)
        self.iteration += 1
        return finished

    def counters(self) -> dict[str, int]:
        return {"iteration": self.iteration}

    def save(self) -> str:
        folder = self._new_folder()
        dist_checkpointing.save(self._state(), folder)
        return folder

    def save_async(self) -> str:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        folder = self._new_folder()
        how: dict[str, Any] = {"async_sharded_save": True}
        if takes(dist_checkpointing.save, "async_strategy"):
            how["async_strategy"] = "mcore"  # without nvidia-resiliency-ext
        self.queue = AsyncCallsQueue()
        self.queue.schedule_async_request(dist_checkpointing.save(self._state(), folder, **how))
        return folder

    def saved(self) -> None:
        self.queue.maybe_finalize_async_calls(blocking=True)
        self.queue.close()

    def load(self, state: str) -> None:
        found = dist_checkpointing.load(self._state(is_loading=True), state)
        self._load_models(found)
        with torch.no_grad():  # upstream copies into fp32 parameters in place
            self.subject.optimizer.load_state_dict(found["optimizer"])
        self.subject.scheduler.load_state_dict(found["opt_param_scheduler"])
        self.iteration = found["iteration"]
        (random_state,) = found.get("rng_state", [None])
        if random_state is not None:
            random.setstate(random_state["random_rng_state"])
            numpy.random.set_state(random_state["np_rng_state"])
            torch.set_rng_state(random_state["torch_rng_state"])
            torch.cuda.set_rng_state(random_state["cuda_rng_state"])
            tracker = tensor_parallel.get_cuda_rng_tracker()
            tracker.set_states(random_state["rng_tracker_states"])

    def load_weights(self, state: str) -> None:
        self._load_models(dist_checkpointing.load(self._models(), state))
        self.subject.optimizer.reload_model_params()

    def _new_folder(self) -> str:
        assert self.subject.folder is not None
        self.saves += 1
        folder = self.subject.folder / f"{type(self).__name__}-{self.iteration}-{self.saves}"
        if torch.distributed.get_rank() == 0:
            folder.mkdir(parents=True)
        torch.distributed.barrier()
        return str(folder)

    def _models(self) -> dict[str, Any]:
        """Name the chunks as upstream does."""
        names = ["model"] if len(self.subject.chunks) == 1 else None
        return {
            (names[0] if names else f"model{index}"): chunk.module.sharded_state_dict()
            for index, chunk in enumerate(self.subject.chunks)
        }

    def _load_models(self, found: dict[str, Any]) -> None:
        for chunk, name in zip(self.subject.chunks, self._models(), strict=True):
            chunk.module.load_state_dict(found[name])

    def _state(self, *, is_loading: bool = False) -> dict[str, Any]:
        models = self._models()
        how: dict[str, Any] = {"sharding_type": self.sharding}
        if takes(DistributedOptimizer.sharded_state_dict, "metadata"):
            how = {"metadata": {"distrib_optim_sharding_type": self.sharding, **_METADATA}}
        return {
            **models,
            "optimizer": self.subject.optimizer.sharded_state_dict(
                models, is_loading=is_loading, **how
            ),
            "opt_param_scheduler": self.subject.scheduler.state_dict(),
            "iteration": self.iteration,
            "rng_state": _random_state(),
        }


def _random_state() -> Any:
    """Return the random states as `megatron.training` saves them, for any replica the same."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    stages = parallel_state.get_pipeline_model_parallel_world_size()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": numpy.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject(
        "rng_state",
        [state],
        (stages, ranks),
        (stage, parallel_state.get_tensor_model_parallel_rank()),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


_ALL = ("dp", "tp", "pp", "ep", "cp")


class DPReshardable(DistCheckpoint):
    """Writes the optimizer's buffers as they are."""

    sharding = "dp_reshardable"


class FullyReshardable(DistCheckpoint):
    """Gathers the optimizer's state on one rank, and writes it by parameter."""

    sharding = "fully_reshardable"
    reshards = _ALL


class ModelSpace(DistCheckpoint):
    """Writes the optimizer's state by parameter, each rank its own shards."""

    sharding = "fully_sharded_model_space"
    reshards = _ALL
