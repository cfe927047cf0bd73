"""Frameworks' own savers and loaders on a rank, around a small model, its optimizer and scheduler.

Each class has `save(folder)`, `load(folder)` and, where the framework has it, `load_weights(folder)`.
All ranks call them at once. Loggers, tokenizers, uploads and Hugging Face's formats are stand-ins.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_idempotent.patches.frameworks import _bridge, _skyrl, _standins, _verl


def _import(source: str, package: str, names: tuple[str, ...], *absent: str) -> list[Any]:
    """Import these modules of a framework from its checkout; the rest of it are stand-ins."""
    if source not in sys.path:
        sys.path.insert(0, source)
    return [_standins.import_alone(f"{package}.{name}", *absent) for name in names]


class Saver:
    """Holds what a framework's functions save, and call them by one name."""

    def __init__(self, chunks: list[Any], optimizer: Any, scheduler: Any, config: Any) -> None:
        self.chunks, self.optimizer, self.scheduler = chunks, optimizer, scheduler
        self.config = config
        self.start()

    def start(self) -> None:
        """Import the framework's modules, and make the object whose methods save."""


class SkyRL(Saver):
    """SkyRL's `MegatronStrategy`."""

    names = (
        "backends.skyrl_train.utils.io.s3fs",
        "backends.skyrl_train.utils.io.io",
        "backends.skyrl_train.utils.io",
        "backends.skyrl_train.distributed.megatron.megatron_utils",
        "backends.skyrl_train.distributed.strategy",
        "backends.skyrl_train.distributed.megatron.megatron_strategy",
    )

    def start(self, **options: Any) -> None:
        absent = (*_skyrl._ABSENT, "jaxtyping", "ray", "s3fs", "botocore", "boto3")
        module = _import(os.environ["SKYRL_SOURCE"], "skyrl", self.names, *absent)[-1]
        module.io = sys.modules["skyrl.backends.skyrl_train.utils.io.io"]
        config = {
            "dist_ckpt_optim_fully_reshardable": False,
            "async_dist_ckpt_save": False,
            "async_dist_ckpt_strategy": "mcore",
            "async_save_prestage_to_cpu": False,
            **options,
        }
        self.strategy = module.MegatronStrategy(SimpleNamespace(**config))
        self.strategy.hf_config = SimpleNamespace(save_pretrained=lambda _: None)
        self.strategy.print = lambda *_: None
        self.model = SimpleNamespace(actor_module=self.chunks)

    def save(self, folder: str) -> None:
        self.strategy.save_checkpoint(self.model, folder, 0, self.optimizer, self.scheduler)

    def load(self, folder: str) -> None:
        self.strategy.load_checkpoint(self.model, folder, self.optimizer, self.scheduler)

    def load_weights(self, folder: str) -> None:
        self.strategy.load_checkpoint(
            self.model,
            folder,
            load_optimizer_states=False,
            load_lr_scheduler_states=False,
        )


class Verl(Saver):
    """verl's `MegatronCheckpointManager`, with Megatron's shards for the model."""

    names = (
        "utils.device",
        "utils.fs",
        "utils.checkpoint.checkpoint_manager",
        "utils.megatron.dist_checkpointing",
        "utils.megatron_utils",
        "utils.checkpoint.megatron_checkpoint_manager",
    )
    scheduler_of_checkpoint = False  # verl's default

    def start(self, **contents: Any) -> None:
        module = _import(os.environ["VERL_SOURCE"], "verl", self.names, *_verl._ABSENT)[-1]
        module.get_device_name = lambda: "cuda"
        module.is_device_available = lambda: True
        module.get_torch_device = lambda: __import__("torch").cuda
        module.is_non_local = lambda _: False
        module.local_mkdir_safe = lambda path: os.makedirs(path, exist_ok=True) or path
        module.log_with_rank = lambda *_, **__: None
        self.manager = self.made(module)
        self.weights = self.made(module, load_contents=["model"])

    def made(self, module: Any, **contents: Any) -> Any:
        megatron = SimpleNamespace(
            dist_ckpt_optim_fully_reshardable=False,
            distrib_optim_fully_reshardable_mem_efficient=False,
        )
        return module.MegatronCheckpointManager(
            config=SimpleNamespace(
                model=SimpleNamespace(path=""), actor=SimpleNamespace(megatron=megatron)
            ),
            checkpoint_config=_Config(async_save=False, **contents),
            model_config=None,
            transformer_config=SimpleNamespace(),
            role="actor",
            model=self.chunks,
            arch="GPTModel",
            hf_config=None,
            param_dtype=None,
            share_embeddings_and_output_weights=False,
            processing_class=None,
            optimizer=self.optimizer,
            optimizer_scheduler=self.scheduler,
            use_distributed_optimizer=self.chunks[0].ddp_config.use_distributed_optimizer,
            use_checkpoint_opt_param_scheduler=self.scheduler_of_checkpoint,
            use_dist_checkpointing=True,
        )

    def save(self, folder: str) -> None:
        self.manager.save_checkpoint(folder)

    def load(self, folder: str) -> None:
        self.manager.load_checkpoint(folder)

    def load_weights(self, folder: str) -> None:
        self.weights.load_checkpoint(folder)


class _Config(dict):  # type: ignore[type-arg]
    """A dictionary with its items as attributes, as verl's configurations are."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


class Bridge(Saver):
    """Megatron-Bridge's `save_checkpoint` and `load_checkpoint`."""

    names = (
        "training",
        "utils.common_utils",
        "utils.import_utils",
        "utils.safe_pickle",
        "utils.yaml_utils",
        "utils.instantiate_utils",
        "training.callbacks",
        "training.utils.config_utils",
        "training.utils.log_utils",
        "training.utils.pg_utils",
        "training.config",
        "training.state",
        "training.utils.checkpoint_utils",
        "training.checkpointing",
    )

    def start(self, **options: Any) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        found = _import(
            os.environ["BRIDGE_SOURCE"], "megatron.bridge", self.names, "modelopt", "transformers"
        )
        self.module, self.utils = found[-1], found[-2]
        self.module.is_hf_checkpoint_dir = lambda _: False
        self.module.restore_modelopt_state = lambda *_: None
        self.module.fault_tolerance = _standins.Thing()
        self.module.should_fire = lambda *_: False
        self.module.is_last_rank = lambda: False
        self.state = found[-3].GlobalState()
        model = self.config
        self.checkpoint = found[-4].CheckpointConfig(
            async_strategy="mcore", save_tokenizer_assets=False, **options
        )
        self.cfg = _bridge._Off(
            checkpoint=self.checkpoint,
            ddp=_bridge._Off(),
            dist=_bridge._Off(use_decentralized_pg=True),
            logger=_bridge._Off(),
            model=model,
            optimizer=_bridge._Off(
                use_distributed_optimizer=self.chunks[0].ddp_config.use_distributed_optimizer
            ),
            rng=_bridge._Off(),
            dataset=_bridge._Off(),
            to_yaml=self._described,
        )
        self.state._cfg = self.cfg
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.context: dict[str, Any] = {}

    def _described(self, path: str) -> None:
        import yaml

        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        Path(path).write_text(
            yaml.safe_dump(
                {
                    "model": {name: getattr(self.config, name) for name in sizes},
                    "checkpoint": {
                        "save_optim": True,
                        "save_rng": True,
                        "fully_parallel_save": True,
                    },
                }
            )
        )

    def save(self, folder: str) -> None:
        self.checkpoint.save = folder
        self.module.save_checkpoint(
            self.state,
            self.chunks,
            self.optimizer,
            self.scheduler,
            0,
            self.context,
            pg_collection=self.groups,
        )

    def load(self, folder: str) -> None:
        self.checkpoint.load = folder
        self.module.load_checkpoint(
            self.state,
            self.chunks,
            self.optimizer,
            self.scheduler,
            checkpointing_context=self.context,
            pg_collection=self.groups,
        )

    def load_weights(self, folder: str) -> None:
        self.checkpoint.load_optim = self.checkpoint.load_rng = False
        try:
            self.load(folder)
        finally:
            self.checkpoint.load_optim = self.checkpoint.load_rng = True


class Slime(Saver):
    """slime's `save` and `load_checkpoint`, which call Megatron's own."""

    names = (
        "backends.megatron_utils",
        "backends.megatron_utils.checkpoint",
        "backends.megatron_utils.model",
    )

    def start(self, **options: Any) -> None:
        import argparse

        from megatron.training import arguments, global_vars

        parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
        self.args = parser.parse_args([])
        ddp = self.chunks[0].ddp_config
        vars(self.args).update(
            bf16=self.config.bf16,
            fp16=self.config.fp16,
            overlap_param_gather=ddp.overlap_param_gather,
            use_distributed_optimizer=ddp.use_distributed_optimizer,
            use_dist_ckpt=True,
            tensor_model_parallel_size=self.config.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.config.pipeline_model_parallel_size,
            consumed_train_samples=0,
            consumed_valid_samples=0,
            skipped_train_samples=0,
            world_size=int(os.environ["WORLD_SIZE"]),
            num_layers=self.config.num_layers,
            hidden_size=self.config.hidden_size,
            num_attention_heads=self.config.num_attention_heads,
            ckpt_fully_parallel_save=True,
            **options,
        )
        global_vars.set_args(self.args)
        found = _import(os.environ["SLIME_SOURCE"], "slime", self.names, "tqdm", "wandb")
        self.checkpoint, self.module = found[-2:]
        self.iteration = 0

    def save(self, folder: str) -> None:
        self.args.save = folder
        self.module.save(self.iteration, self.chunks, self.optimizer, self.scheduler)

    def load(self, folder: str) -> None:
        self.args.load = folder
        self.checkpoint.load_checkpoint(
            self.chunks, self.optimizer, self.scheduler, {}, skip_load_to_model_and_opt=False
        )

    def load_weights(self, folder: str) -> None:
        self.args.no_load_optim = self.args.no_load_rng = True
        with contextlib.suppress(AttributeError):
            self.load(folder)
        self.args.no_load_optim = self.args.no_load_rng = False


SAVERS = {each.__name__: each for each in (SkyRL, Verl, Bridge, Slime)}
