"""Adapters with which `certify` judges frameworks' own savers and loaders, from given sources.

    SKYRL_SOURCE=… PYTHONPATH=.:tests/downstream megatron-idempotent certify savers:SkyRL \\
        --layout dp2-bf16-distopt --check load-into-live-run

They train with `TrainStep`, so that only saves and loads are the framework's. Loggers, tokenizers,
uploads and Hugging Face's formats are stand-ins.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import verl_engine
from megatron_idempotent.patches.frameworks import _bridge, _nemo_rl, _peft, _skyrl, _standins
from megatron_idempotent.patches.frameworks._workers import methods

from megatron_idempotent.proof.certify import Subject
from megatron_idempotent.proof.certify.checkpoints import DistCheckpoint, LowRank, Training

_HOLDER = "megatron.core.dist_checkpointing.strategies.base"


def _import(source: str, package: str, names: tuple[str, ...], *absent: str) -> list[Any]:
    """Import these modules of a framework from its checkout; the rest of it are stand-ins."""
    if source not in sys.path:
        sys.path.insert(0, source)
    return [_standins.import_alone(f"{package}.{name}", *absent) for name in names]


class _Worker(DistCheckpoint):
    """Saves and loads with a worker's functions; the trainer on the driver counts."""

    keeps = ("scheduler", "random", "loss scale", "expert bias")

    def counters(self) -> dict[str, int]:
        return {}


class SkyRL(_Worker):
    """Saves and loads with SkyRL's `MegatronStrategy`."""

    names = (
        "backends.skyrl_train.utils.io.s3fs",
        "backends.skyrl_train.utils.io.io",
        "backends.skyrl_train.distributed.megatron.megatron_utils",
        "backends.skyrl_train.distributed.strategy",
        "backends.skyrl_train.distributed.megatron.megatron_strategy",
    )
    fully = False

    def __init__(self) -> None:
        """Import SkyRL, with a holder of its queue of saves, which its Megatron had in a module."""
        from megatron.core.dist_checkpointing import strategies

        _standins.replace("ray")
        if _HOLDER not in sys.modules and importlib.util.find_spec(_HOLDER) is None:
            sys.modules[_HOLDER] = strategies.base = ModuleType(_HOLDER)
        absent = (*_skyrl._ABSENT, "jaxtyping", "s3fs", "botocore", "boto3")
        self.module = _import(os.environ["SKYRL_SOURCE"], "skyrl", self.names, *absent)[-1]
        self.module.io = sys.modules["skyrl.backends.skyrl_train.utils.io.io"]

    def build(self, subject: Subject) -> None:
        super().build(subject)
        self.config = SimpleNamespace(
            dist_ckpt_optim_fully_reshardable=self.fully,
            async_dist_ckpt_save=False,
            async_dist_ckpt_strategy="mcore",
            async_save_prestage_to_cpu=False,
        )
        self.strategy = self.module.MegatronStrategy(self.config)
        self.strategy.hf_config = SimpleNamespace(save_pretrained=lambda _: None)
        self.strategy.print = lambda *_: None
        self.model = SimpleNamespace(actor_module=subject.chunks)

    def save(self) -> str:
        folder, subject = self._new_folder(), self.subject
        self.strategy.save_checkpoint(self.model, folder, 0, subject.optimizer, subject.scheduler)
        return folder

    def save_async(self) -> str:
        self.config.async_dist_ckpt_save = True
        return self.save()

    def saved(self) -> None:
        self.strategy.finalize_pending_saves()
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


class _Config(dict):  # type: ignore[type-arg]
    """Is a dictionary with its items as attributes, as verl's configurations are."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


class Verl(_Worker):
    """Saves and loads with verl's `MegatronCheckpointManager`, the model in Megatron's shards."""

    names = (
        "utils.device",
        "utils.fs",
        "utils.checkpoint.checkpoint_manager",
        "utils.megatron.dist_checkpointing",
        "utils.megatron_utils",
        "utils.checkpoint.megatron_checkpoint_manager",
    )
    scheduler_too = False
    """verl's own default of `use_checkpoint_opt_param_scheduler`."""

    def __init__(self) -> None:
        """Import verl before Megatron, as its program does."""
        _standins.replace("ray")
        module = _import(os.environ["VERL_SOURCE"], "verl", self.names, *verl_engine._ABSENT)[-1]
        module.get_device_name = lambda: "cuda"
        module.is_device_available = lambda: True
        module.get_torch_device = lambda: torch.cuda
        module.is_non_local = lambda _: False
        module.local_mkdir_safe = lambda path: os.makedirs(path, exist_ok=True) or path
        module.log_with_rank = lambda *_, **__: None
        self.module = module

    def build(self, subject: Subject) -> None:
        super().build(subject)
        self.checkpoint = _Config(async_save=False)
        self.manager = self._manager(self.checkpoint)
        self.of_weights = self._manager(_Config(async_save=False, load_contents=["model"]))

    def _manager(self, checkpoint: _Config) -> Any:
        megatron = SimpleNamespace(
            dist_ckpt_optim_fully_reshardable=False,
            distrib_optim_fully_reshardable_mem_efficient=False,
        )
        subject = self.subject
        return self.module.MegatronCheckpointManager(
            config=SimpleNamespace(
                model=SimpleNamespace(path=""), actor=SimpleNamespace(megatron=megatron)
            ),
            checkpoint_config=checkpoint,
            model_config=None,
            transformer_config=SimpleNamespace(),
            role="actor",
            model=subject.chunks,
            arch="GPTModel",
            hf_config=None,
            param_dtype=None,
            share_embeddings_and_output_weights=False,
            processing_class=None,
            optimizer=subject.optimizer,
            optimizer_scheduler=subject.scheduler,
            use_distributed_optimizer=subject.chunks[0].ddp_config.use_distributed_optimizer,
            use_checkpoint_opt_param_scheduler=self.scheduler_too,
            use_dist_checkpointing=True,
        )

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
        _, self.made = _nemo_rl._modules("policy")

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
        names = ("checkpoint", "model")
        self.checkpoint, self.module = _import(
            os.environ["SLIME_SOURCE"], "slime.backends.megatron_utils", names, "tqdm", "wandb"
        )

    def build(self, subject: Subject) -> None:
        super().build(subject)
        self.args.overlap_param_gather = subject.chunks[0].ddp_config.overlap_param_gather

    def save(self) -> str:
        self.args.save = folder = self._new_folder()
        subject = self.subject
        self.module.save(self.iteration, subject.chunks, subject.optimizer, subject.scheduler)
        return folder

    def _load(self, state: str) -> None:
        self.args.load = state
        subject = self.subject
        with torch.no_grad():  # upstream copies into fp32 parameters in place
            self.iteration, _ = self.checkpoint.load_checkpoint(
                subject.chunks, subject.optimizer, subject.scheduler, {}, False
            )
