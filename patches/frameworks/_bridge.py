"""Runs Megatron-Bridge's own functions around a program of Megatron's, for reproductions.

Bridge cannot be imported without CUDA, so its functions run with stand-ins for the rest of Bridge:
its data, checkpoints, logging and configuration classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import _standins

_OF_CHECKPOINTS = (
    "training",  # runs a recipe's lines, which must come before Megatron's import
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


class _Flops(SimpleNamespace):
    """Stands in for Bridge's FLOP statistics: iterates over five zeros, and every attribute is 0.
    Bridge used a tuple up to 0.6.
    """

    def __iter__(self) -> Iterator[int]:
        return iter((0,) * 5)

    def __getattr__(self, name: str) -> int:
        return 0


class Bridge:
    """Sets up a small model as Bridge's `setup()` leaves it, and runs Bridge's functions on it.

    Args:
        options: options of Megatron, as on a command line.
        train: options of Bridge's `TrainingConfig`.

    Example:
        bridge = Bridge(["--overlap-grad-reduce"])
        bridge.train(2)
    """

    def __init__(self, options: Sequence[str] = (), **train: Any) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.timers import Timers

        from megatron_idempotent.proof.cpu import program

        self.program = running = program.start(options)
        args = running.args
        running.config.seq_length = args.seq_length  # as Bridge's own configs have
        self.timers = Timers(2, "minmax")
        self.cfg = _standins.Off(
            checkpoint=_standins.Off(),
            data_parallel_size=args.data_parallel_size,
            dataset=_standins.Off(dataloader_type="single"),
            ddp=_standins.Off(
                align_param_gather=args.align_param_gather,
                overlap_grad_reduce=args.overlap_grad_reduce,
                overlap_param_gather=args.overlap_param_gather,
            ),
            dist=_standins.Off(use_decentralized_pg=True),
            logger=_standins.Off(skip_train_metrics_log=True),
            model=_standins.Off(cuda_graph_impl="none", seq_length=args.seq_length),
            optimizer=_standins.Off(use_distributed_optimizer=args.use_distributed_optimizer),
            train=_standins.Off(
                empty_unused_memory_level=0,
                global_batch_size=args.global_batch_size,
                iterations_to_skip=[],
                manual_gc_interval=0,
                micro_batch_size=args.micro_batch_size,
                skip_sync_grad_norm_across_mp=True,
                train_iters=0,
                **train,
            ),
            validation=_standins.Off(
                eval_global_batch_size=args.global_batch_size,
                eval_iters=1,
                eval_micro_batch_size=args.micro_batch_size,
            ),
        )
        # Up to 0.3 the options of evaluation are in the training config.
        vars(self.cfg.train).update(vars(self.cfg.validation))
        self.state = _standins.Off(
            cfg=self.cfg,
            start_time=0.0,
            timers=self.timers,
            train_state=_standins.Off(
                consumed_train_samples=0,
                consumed_valid_samples=0,
                floating_point_operations_so_far=0,
                skipped_train_samples=0,
                step=0,
            ),
        )
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.forward_step: Callable[..., Any] = running._forward_step

    def train(self, iterations: int) -> None:
        """Run one call of Bridge's `train`, for `iterations` more iterations.
        All ranks take part.
        """
        module = self._module("train")
        self.cfg.train.train_iters += iterations
        running = self.program
        module.train(
            self.forward_step,
            running.chunks,
            running.optimizer,
            running.scheduler,
            running.data[0],
            None,
            self.state,
            _standins.Thing(),
            self.groups,
        )

    def step(self) -> Any:
        """Run one call of Bridge's `train_step`, and return its result."""
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        module, running = self._module("train"), self.program
        return _standins.call(
            module.train_step,
            forward_step_func=self.forward_step,
            data_iterator=running.data[0],
            model=running.chunks,
            optimizer=running.optimizer,
            scheduler=running.scheduler,
            global_state=self.state,
            pg_collection=self.groups,
            forward_backward_func=get_forward_backward_func(),
            p2p_communicator=P2PCommunicator(self.groups.pp, running.config),
        )

    def evaluate(self) -> Any:
        """Run one call of Bridge's `evaluate`, and return its result."""
        module = self._module("eval")
        module.get_pg_collection.return_value = self.groups
        running = self.program
        return module.evaluate(
            self.state, self.forward_step, running.data[0], running.chunks, None, running.config
        )

    def wire(self) -> None:
        """Run the last part of Bridge's `setup`, which sets functions such as `no_sync_func`."""
        module = self._module("setup")
        module.MEGATRON_FSDP_TYPES = ()
        module._update_model_config_funcs(
            self.program.chunks,
            self.program.config,
            self.cfg.ddp,
            self.program.optimizer,
            align_grad_reduce=True,
        )

    def _module(self, name: str) -> Any:
        module = _standins.import_alone(f"megatron.bridge.training.{name}", "modelopt")
        if name == "train":
            flops = module.flop_utils
            flops.num_floating_point_operations.return_value = 0
            flops.resolve_global_flops_runtime_stats.return_value = _Flops()
            module.handle_profiling_step.return_value = None
            module.should_profile_rank.return_value = False
            module.check_nvrx_straggler_detection.return_value = False
        if name != "setup":
            module.prepare_forward_step_func = lambda function, state: function
            module.should_fire = lambda callbacks, event: False
            module.is_full_iteration_cuda_graph = lambda config: False
        return module


def import_checkpoints() -> tuple[Any, Any, Any]:
    """Import and return three modules of Bridge: configurations, training state and checkpoints."""
    modules = _standins.import_all("megatron.bridge", _OF_CHECKPOINTS, "modelopt", "transformers")
    module = modules["training.checkpointing"]
    module.fault_tolerance = _standins.Thing()
    module.is_hf_checkpoint_dir = module.should_fire = lambda *_: False
    module.is_last_rank = lambda: False  # trackers of experiments log on that rank
    for printing in (module, modules["training.utils.checkpoint_utils"]):
        printing.print_rank_0 = lambda _: None
    return modules["training.config"], modules["training.state"], module


class Checkpoints:
    """Saves and loads model chunks, optimizer and scheduler with Bridge's own functions.

    Example:
        checkpoints = Checkpoints(model.chunks, model.optimizer, None, model.config)
        checkpoints.save("/tmp/a")
        checkpoints.load("/tmp/a")
    """

    def __init__(self, chunks: list[Any], optimizer: Any, scheduler: Any, config: Any) -> None:
        from megatron.core import num_microbatches_calculator as calculator
        from megatron.core.process_groups_config import ProcessGroupCollection

        configs, states, self.module = import_checkpoints()
        calculator.unset_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(0, None, 4, 2, 1)
        self.held = chunks, optimizer, scheduler
        self.config = config
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.context: dict[str, Any] = {}
        self.checkpoint = configs.CheckpointConfig(
            async_strategy="mcore", save_tokenizer_assets=False
        )
        self.state = states.GlobalState()
        sharded = chunks[0].ddp_config.use_distributed_optimizer
        self.state._cfg = _standins.Off(
            checkpoint=self.checkpoint,
            dataset=_standins.Off(),
            ddp=_standins.Off(),
            dist=_standins.Off(use_decentralized_pg=True),
            logger=_standins.Off(),
            model=config,
            optimizer=_standins.Off(use_distributed_optimizer=sharded),
            rng=_standins.Off(),
            to_yaml=self._describe,
        )

    @staticmethod
    def after_a_step() -> Checkpoints:
        """Return a `Checkpoints` for a tiny model and its optimizer, after one optimizer step."""
        from megatron_idempotent.proof.cpu import tiny

        model = tiny.build()
        model.train_step(1, data_seed=0)
        return Checkpoints(model.chunks, model.optimizer, None, model.config)

    def save(self, folder: str) -> None:
        """Run Bridge's `save_checkpoint`. All ranks take part."""
        self.checkpoint.save = folder
        self.module.save_checkpoint(
            self.state, *self.held, 0, self.context, pg_collection=self.groups
        )

    def load(self, folder: str) -> None:
        """Run Bridge's `load_checkpoint`. All ranks take part."""
        self.checkpoint.load = folder
        self.module.load_checkpoint(
            self.state, *self.held, checkpointing_context=self.context, pg_collection=self.groups
        )

    def _describe(self, path: str) -> None:
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        text = "".join(f"  {name}: {getattr(self.config, name)}\n" for name in sizes)
        saved = "".join(f"  {n}: true\n" for n in ("save_optim", "save_rng", "fully_parallel_save"))
        Path(path).write_text(f"model:\n{text}checkpoint:\n{saved}", encoding="utf-8")
