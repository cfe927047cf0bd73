"""Adapters with which `certify` judges frameworks' own savers and loaders, from given sources.

    SKYRL_SOURCE=… PYTHONPATH=.:tests/downstream megatron-idempotent certify savers:SkyRL \\
        --layout dp2-bf16-distopt --check load-into-live-run

They train with `TrainStep`, so that only saves and loads are the framework's. Loggers, tokenizers,
uploads and Hugging Face's formats are stand-ins.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from adapters import import_from
from megatron_idempotent.patches.frameworks import (
    _bridge,
    _nemo_rl,
    _peft,
    _skyrl,
    _verl,
)
from megatron_idempotent.patches.frameworks._workers import methods

import megatron_idempotent
from megatron_idempotent.proof.certify import Subject
from megatron_idempotent.proof.certify.checkpoints import DistCheckpoint, LowRank, Training


class _Worker(DistCheckpoint):
    """Saves and loads with a worker's functions; the trainer on the driver counts."""

    keeps = ("scheduler", "random", "loss scale", "expert bias")

    def counters(self) -> dict[str, int]:
        return {}


class SkyRL(_Worker):
    """Saves and loads with SkyRL's `MegatronStrategy`."""

    def __init__(self) -> None:
        """Import SkyRL before Megatron, as its program does."""
        sys.path.insert(0, os.environ["SKYRL_SOURCE"])
        _skyrl.import_strategy()

    def build(self, subject: Subject) -> None:
        super().build(subject)
        self.strategy, self.model = _skyrl.strategy_of(subject.chunks)
        self.config = self.strategy.megatron_config

    def save(self) -> str:
        folder, subject = self._new_folder(), self.subject
        self.strategy.save_checkpoint(self.model, folder, 0, subject.optimizer, subject.scheduler)
        return folder

    def save_async(self) -> str:
        self.config.async_dist_ckpt_save = True
        return self.save()

    def saved(self) -> None:
        try:
            self.strategy.finalize_pending_saves()
        finally:
            self.config.async_dist_ckpt_save = False

    def load(self, state: str) -> None:
        subject = self.subject
        with torch.no_grad():  # upstream copies into fp32 parameters in place
            self.strategy.load_checkpoint(self.model, state, subject.optimizer, subject.scheduler)

    def load_weights(self, state: str) -> None:
        """Load as the worker's `load_checkpoint` does without optimizer and scheduler states."""
        self.strategy.load_checkpoint(
            self.model,
            state,
            None,
            None,
            load_optimizer_states=False,
            load_lr_scheduler_states=False,
        )


class SkyRLSynced(SkyRL):
    """Calls `ensure_main_params_synced` after weights alone, the remedy of docs/findings.md."""

    def load_weights(self, state: str) -> None:
        super().load_weights(state)
        megatron_idempotent.ensure_main_params_synced(self.subject.optimizer)


class Verl(_Worker):
    """Saves and loads with verl's `MegatronCheckpointManager`, the model in Megatron's shards."""

    scheduler_too = False
    """verl's own default of `use_checkpoint_opt_param_scheduler`."""

    def __init__(self) -> None:
        """Import verl before Megatron, as its program does."""
        sys.path.insert(0, os.environ["VERL_SOURCE"])
        _verl.import_manager()

    def build(self, subject: Subject) -> None:
        super().build(subject)
        held = subject.chunks, subject.optimizer, subject.scheduler
        self.manager = _verl.manager_of(*held, scheduler_too=self.scheduler_too)
        self.of_weights = _verl.manager_of(*held, load_contents=["model"])

    def save(self) -> str:
        folder = self._new_folder()
        self.manager.save_checkpoint(folder)
        return folder

    def load(self, state: str) -> None:
        with torch.no_grad():  # upstream copies into fp32 parameters in place
            self.manager.load_checkpoint(state)

    def load_weights(self, state: str) -> None:
        """Load with `load_contents: [model]`."""
        self.of_weights.load_checkpoint(state)

    save_async = saved = None  # its queue is Megatron's of 0.14 and earlier


class VerlSynced(Verl):
    """Calls `ensure_main_params_synced` after weights alone, as `SkyRLSynced` does."""

    def load_weights(self, state: str) -> None:
        super().load_weights(state)
        megatron_idempotent.ensure_main_params_synced(self.subject.optimizer)


class VerlScheduler(Verl):
    """Does so with `use_checkpoint_opt_param_scheduler: True`."""

    scheduler_too = True


class Bridge(DistCheckpoint):
    """Saves and loads with Megatron-Bridge's `save_checkpoint` and `load_checkpoint`."""

    save_async = saved = None

    def __init__(self) -> None:
        """Import Megatron-Bridge before Megatron, as its program does."""
        if os.environ["BRIDGE_SOURCE"] not in sys.path:
            sys.path.insert(0, os.environ["BRIDGE_SOURCE"])
        _bridge.import_checkpoints()

    def build(self, subject: Subject) -> None:
        super().build(subject)
        self.bridge = _bridge.Checkpoints(
            subject.chunks, subject.optimizer, subject.scheduler, subject.config
        )

    def finish(self, **how: Any) -> Any:
        finished = super().finish(**how)
        train = self.bridge.state.train_state  # as Bridge's `train` counts
        train.step += 1
        train.consumed_train_samples += 4
        return finished

    def counters(self) -> dict[str, int]:
        train = self.bridge.state.train_state
        return {"step": train.step, "consumed_train_samples": train.consumed_train_samples}

    def save(self) -> str:
        folder = self._new_folder()
        self.bridge.save(folder)
        return folder

    def load(self, state: str) -> None:
        self.bridge.load(state)

    def load_weights(self, state: str) -> None:
        """Load with `load_optim` and `load_rng` off, and count on."""
        kept, how = dict(vars(self.bridge.state.train_state)), self.bridge.checkpoint
        how.load_optim = how.load_rng = False
        try:
            self.load(state)
        finally:
            how.load_optim = how.load_rng = True
            vars(self.bridge.state.train_state).update(kept)


class BridgeAdapters(LowRank):
    """Saves Bridge's DoRA with its optimizer, and nothing of the base, by `dist_checkpointing`."""

    def __init__(self) -> None:
        """Let Bridge be found."""
        if os.environ["BRIDGE_SOURCE"] not in sys.path:
            sys.path.insert(0, os.environ["BRIDGE_SOURCE"])

    def before_ddp(self, module: Any) -> None:
        _peft.bridge("DoRA", dim=4, alpha=8)(module)


class NemoRL(Bridge):
    """Saves with NeMo-RL's policy worker, and loads as its set-up does, with Bridge's functions."""

    keeps = ("scheduler", "loss scale", "expert bias", "counters")  # its `load_rng` is False

    def __init__(self) -> None:
        """Import NeMo-RL before Megatron, as its program does."""
        super().__init__()
        sys.path.insert(0, os.environ["NEMO_RL_SOURCE"])
        _, self.made = _nemo_rl.import_worker("policy")

    def build(self, subject: Subject) -> None:
        super().build(subject)
        self.bridge.checkpoint.load_rng = False
        (model,) = subject.chunks
        self.worker = methods(
            self.made,
            mcore_state=self.bridge.state,
            model=model,
            optimizer=subject.optimizer,
            scheduler=subject.scheduler,
            checkpointing_context=self.bridge.context,
            optimizer_cpu_offload=False,
            should_disable_forward_pre_hook=model.ddp_config.overlap_param_gather,
            _async_checkpoint_cuda_cache_active=False,
            megatron_cfg=SimpleNamespace(optimizer=None, ddp=None),
        )

    def save(self) -> str:
        folder = self._new_folder()
        self.worker.save_checkpoint(folder, optimizer_path=folder)
        return folder


class Slime(Training):
    """Saves and loads with slime's `save` and `load_checkpoint`, which call Megatron's."""

    def __init__(self) -> None:
        """Import slime before Megatron, as its program does."""
        package, names = "slime.backends.megatron_utils", ("checkpoint", "model")
        imported = import_from(os.environ["SLIME_SOURCE"], package, names, "tqdm", "wandb")
        self.checkpoint, self.module = imported["checkpoint"], imported["model"]
        # slime takes a folder without a tracker file for one of Hugging Face's.
        importlib.import_module(f"{package}.hf_to_megatron").load_hf_weights = _no_hugging_face

    def build(self, subject: Subject) -> None:
        super().build(subject)
        self.args.overlap_param_gather = subject.chunks[0].ddp_config.overlap_param_gather

    def save(self) -> str:
        self.args.save = folder = self._new_folder()
        subject = self.subject
        self.module.save(self.iteration, subject.chunks, subject.optimizer, subject.scheduler)
        return folder

    def load(self, state: str) -> None:
        self.args.load = state
        subject = self.subject
        with torch.no_grad():  # upstream copies into fp32 parameters in place
            self.iteration, _ = self.checkpoint.load_checkpoint(
                subject.chunks, subject.optimizer, subject.scheduler, {}, False
            )


def _no_hugging_face(args: Any, model: Any, folder: str) -> None:
    """Stand for slime's loader of Hugging Face's checkpoints, in a folder that has none."""
    raise FileNotFoundError(f"{folder} has no config.json")
