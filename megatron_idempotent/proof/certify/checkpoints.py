"""Adapts Megatron's own ways to save and load a run to the checks of state.

All of them train with `TrainStep`. `DPReshardable`, `FullyReshardable` and `ModelSpace` call
`megatron.core.dist_checkpointing`, each with a format of the distributed optimizer. `Training` and
`Legacy` call `megatron.training.checkpointing`, which wheels have from 0.17 on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

import megatron_idempotent
from megatron_idempotent.megatron.layer_specs import takes
from megatron_idempotent.megatron.optimizers import unchained
from megatron_idempotent.proof.cpu import program
from megatron_idempotent.window.accumulation import set_for

from . import low_rank
from .adapters import SplitStep
from .protocol import Subject
from .states import put_random, random_states

#: Metadata that `megatron.training` passes beside the format.
_METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


Saved = tuple[tuple[int, int, int], str]
"""The result of `_ranks` at the time of the save, and the checkpoint's folder."""


class DistCheckpoint(SplitStep):
    """An adapter that trains with `TrainStep`, and saves and loads with
    `megatron.core.dist_checkpointing`.
    """

    keeps = ("scheduler", "random", "loss scale", "expert bias", "counters")
    reshards: tuple[str, ...] = ("dp",)
    sharding: str
    saves_all = True
    """False if some parameters are not saved."""
    persistent = False
    """True if one process writes all asynchronous saves; False if each save forks its own."""

    def build(self, subject: Subject) -> None:
        super().build(subject)
        self.iteration = self.saves = 0
        if getattr(filesystem_async, "_results_queue", ()) is None:
            # A fork: upstream would spawn it, and import Megatron for some ten seconds.
            manager = multiprocessing.get_context("fork").Manager()
            filesystem_async._results_queue = manager.Queue()
        # The class of the inner optimizer is in its groups, and so in the checkpoint.
        torch.serialization.add_safe_globals([torch.optim.AdamW])

    def finish(self, **kwargs: Any) -> Any:
        finished = super().finish(**kwargs)
        self.iteration += 1
        return finished

    def counters(self) -> dict[str, Any]:
        return {"iteration": self.iteration}

    def save(self) -> Saved:
        folder = self._new_folder()
        dist_checkpointing.save(self._state(), folder)
        return _ranks(), folder

    def save_async(self) -> Saved:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        folder = self._new_folder()
        options: dict[str, Any] = {"async_sharded_save": True}
        if takes(dist_checkpointing.save, "async_strategy"):
            options["async_strategy"] = "mcore"  # without nvidia-resiliency-ext
        self.queue = AsyncCallsQueue(persistent=self.persistent)
        self.queue.schedule_async_request(dist_checkpointing.save(self._state(), folder, **options))
        return _ranks(), folder

    def saved(self) -> None:
        try:
            self.queue.maybe_finalize_async_calls(blocking=True)
        finally:
            self.queue.close()

    def load(self, state: Saved) -> None:
        ranks, folder = state
        request = self._state(is_loading=True)
        if ranks != _ranks():  # upstream drops it, too, for other stages or tensor-parallel ranks
            del request["rng_state"]
        checkpoint = dist_checkpointing.load(request, folder)
        self._load_models(checkpoint)
        with torch.no_grad():  # upstream copies into fp32 parameters in place
            self.subject.optimizer.load_state_dict(checkpoint["optimizer"])
        self.subject.scheduler.load_state_dict(checkpoint["opt_param_scheduler"])
        self.iteration = checkpoint["iteration"]
        for states in checkpoint.get("rng_state", ()):
            put_random(states)

    def load_weights(self, state: Saved) -> None:
        self._load_models(dist_checkpointing.load(self._models(), state[1]))
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
        """Return each chunk's sharded state dict, by Megatron's key for the chunk: "model" for a
        single chunk, else "model0", "model1".
        """
        several = len(self.subject.chunks) > 1
        return {
            f"model{index if several else ''}": chunk.module.sharded_state_dict()
            for index, chunk in enumerate(self.subject.chunks)
        }

    def _load_models(self, checkpoint: dict[str, Any]) -> None:
        for chunk, name in zip(self.subject.chunks, self._models(), strict=True):
            chunk.module.load_state_dict(checkpoint[name], strict=self.saves_all)

    def _state(self, *, is_loading: bool = False) -> dict[str, Any]:
        models = self._models()
        options: dict[str, Any] = {"sharding_type": self.sharding}
        if takes(DistributedOptimizer.sharded_state_dict, "metadata"):
            options = {"metadata": {"distrib_optim_sharding_type": self.sharding, **_METADATA}}
        return {
            **models,
            "optimizer": self.subject.optimizer.sharded_state_dict(
                models, is_loading=is_loading, **options
            ),
            "opt_param_scheduler": self.subject.scheduler.state_dict(),
            "iteration": self.iteration,
            "rng_state": ShardedObject("rng_state", [random_states()], _ranks(), _rank()),
        }


def _ranks() -> tuple[int, int, int]:
    """Return the sizes of this rank's pipeline-parallel group, its tensor-parallel group, and its
    data-parallel group with context-parallel ranks.
    """
    return (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )


def _rank() -> tuple[int, int, int]:
    """Return this rank's pipeline stage, tensor-parallel rank, and data x context-parallel rank."""
    return (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


_ALL = ("dp", "tp", "pp", "ep", "cp")


class DPReshardable(DistCheckpoint):
    """Saves in the format "dp_reshardable": the distributed optimizer's flat buffers unchanged."""

    sharding = "dp_reshardable"


class Persistent(DPReshardable):
    """Saves as `DPReshardable`; one long-lived process writes all asynchronous saves
    (`--use-persistent-ckpt-worker`).
    """

    persistent = True


class FullyReshardable(DistCheckpoint):
    """Saves in the format "fully_reshardable": one rank gathers optimizer state by parameter."""

    sharding = "fully_reshardable"
    reshards = _ALL


class ModelSpace(DistCheckpoint):
    """Saves in the format "fully_sharded_model_space": each rank writes its optimizer state by
    parameter.
    """

    sharding = "fully_sharded_model_space"
    reshards = _ALL


class OnHost(DPReshardable):
    """Saves as `DPReshardable`, and trains with half of the optimizer's state on the host
    (`--optimizer-cpu-offload`).
    """

    parts = ()  # moments are on the host already
    optimizer_overrides = MappingProxyType(
        {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 0.5,
            "overlap_cpu_optimizer_d2h_h2d": True,
        }
    )


class LowRank(DPReshardable):
    """Trains float32 low-rank factors over a frozen base model; saves only the factors and the
    experts' biases.

    The biases move although the base is frozen.
    """

    saves_all = False

    def before_ddp(self, module: Any) -> None:
        module.requires_grad_(False)
        low_rank.add(module, rank=2, wide=True)

    def _models(self) -> dict[str, Any]:
        return {
            name: {
                key: value
                for key, value in state.items()
                if ".adapter." in key or key.endswith(".expert_bias")
            }
            for name, state in super()._models().items()
        }


class Training(DistCheckpoint):
    """An adapter that saves and loads by `megatron.training.checkpointing`, as `pretrain` does."""

    flags: tuple[str, ...] = ("--ckpt-format", "torch_dist")
    strategy = "mcore"

    def build(self, subject: Subject) -> None:
        from megatron.core import num_microbatches_calculator
        from megatron.training import arguments, global_vars

        super().build(subject)
        with program.arguments_of([*_REQUIRED, *self.flags]):
            args = self.args = arguments.parse_args()
        config = subject.config
        for name in ("tensor", "pipeline"):
            setattr(args, word := f"{name}_model_parallel_size", getattr(config, word))
        args.bf16, args.fp16 = config.bf16, config.fp16
        args.params_dtype = config.params_dtype
        args.data_parallel_size = parallel_state.get_data_parallel_world_size()
        args.use_dist_ckpt = args.ckpt_format != "torch"
        args.use_distributed_optimizer = hasattr(
            unchained(subject.optimizer)[0], "shard_fp32_from_float16_groups"
        )
        args.save = args.load = str(subject.folder)
        args.iteration = args.consumed_train_samples = 0
        global_vars.unset_global_variables()
        global_vars.set_args(args)
        num_microbatches_calculator.unset_num_microbatches_calculator()
        num_microbatches_calculator.init_num_microbatches_calculator(0, None, 4, 2, 1)

    def finish(self, **kwargs: Any) -> Any:
        finished = super().finish(**kwargs)
        self.args.iteration = self.iteration
        self.args.consumed_train_samples += 4
        return finished

    def counters(self) -> dict[str, Any]:
        """Return Megatron's iteration, its consumed samples, and the samples that its sampler
        yields next.
        """
        from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

        consumed = self.args.consumed_train_samples
        replica = parallel_state.get_data_parallel_rank()
        replicas = parallel_state.get_data_parallel_world_size()
        sampler = MegatronPretrainingSampler(1000, consumed, 2, replica, replicas)
        return {
            "iteration": self.iteration,
            "consumed_train_samples": consumed,
            "next samples": next(iter(sampler)),
        }

    def save(self) -> Any:
        from megatron.training import checkpointing

        assert self.subject.folder is not None
        self.saves += 1
        self.args.save = str(self.subject.folder / f"{self.iteration}-{self.saves}")
        subject = self.subject
        # Upstream's training loop does this before a save.
        megatron_idempotent.ensure_params_synced(subject.chunks)
        checkpointing.save_checkpoint(
            self.iteration, subject.chunks, subject.optimizer, subject.scheduler, 0
        )
        return self.args.save

    def save_async(self) -> Any:
        from megatron.training import async_utils

        self.args.async_strategy = self.strategy
        if self.persistent:  # as `initialize_megatron` does
            async_utils.init_persistent_async_worker(torch.distributed.get_rank())
        with contextlib.ExitStack() as stack:
            set_for(stack, self.args, "async_save", True)
            return self.save()

    def saved(self) -> None:
        from megatron.training import async_utils

        with contextlib.ExitStack() as stack:
            set_for(stack, self.args, "async_save", True)
            async_utils.maybe_finalize_async_save(blocking=True, terminate=True)

    def load_weights(self, state: Any) -> None:
        with contextlib.ExitStack() as stack:
            set_for(stack, self, "iteration", self.iteration)
            set_for(stack, self.args, "consumed_train_samples", self.args.consumed_train_samples)
            set_for(stack, self.args, "no_load_optim", True)
            set_for(stack, self.args, "no_load_rng", True)
            self.load(state)

    def load(self, state: Any) -> None:
        from megatron.training import checkpointing

        subject = self.subject
        self.args.load = state
        if not Path(checkpointing.get_checkpoint_tracker_filename(state)).is_file():
            # Without the file upstream would start a new run.
            raise FileNotFoundError(f"{state} has no checkpoint: its tracker file is missing")
        with torch.no_grad():  # upstream copies into fp32 parameters in place
            self.iteration, _ = checkpointing.load_checkpoint(
                subject.chunks, subject.optimizer, subject.scheduler
            )


class TrainingFully(Training):
    """Saves and loads as `Training`, with `--dist-ckpt-optim-fully-reshardable`."""

    reshards = _ALL
    flags = ("--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable")


class Resilient(Training):
    """An adapter that saves and loads like `Training`, except that its asynchronous saves use
    nvidia-resiliency-ext, which is Megatron's default from 0.17 on.
    """

    strategy = "nvrx"


class ResilientPersistent(Resilient):
    """Saves as `Resilient`; one long-lived process writes all asynchronous saves
    (`--use-persistent-ckpt-worker`).
    """

    persistent = True


class Legacy(Training):
    """An adapter that saves and loads with `--ckpt-format torch`, which writes a file for each
    model-parallel rank.
    """

    reshards = ()
    flags = ("--ckpt-format", "torch")
    save_async: Any = None
    saved: Any = None


_REQUIRED = [
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "2"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--train-iters", "10"),
    *("--lr", "0.01"),
]
"""Arguments that `megatron.training` requires; no check depends on them."""
