"""Runs Megatron-Bridge's own functions around a program of Megatron's, for reproductions.

Bridge does not import without CUDA, so its functions run with stand-ins for the rest of Bridge:
its data, checkpoints, logging and configuration classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from . import _standins


class _Off(SimpleNamespace):
    """Stands for a configuration that has every option, off unless it was given."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Flops(SimpleNamespace):
    """Holds statistics that are all 0: as a tuple of five up to 0.6, as attributes after that."""

    def __iter__(self) -> Iterator[int]:
        return iter((0,) * 5)

    def __getattr__(self, name: str) -> int:
        return 0


class Bridge:
    """Trains a model with Bridge, which is as after its `setup()`.

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
        running.config.seq_length = args.seq_length  # which Bridge's own configs have
        self.timers = Timers(2, "minmax")
        self.cfg = _Off(
            checkpoint=_Off(),
            data_parallel_size=args.data_parallel_size,
            dataset=_Off(dataloader_type="single"),
            ddp=_Off(
                align_param_gather=args.align_param_gather,
                overlap_grad_reduce=args.overlap_grad_reduce,
                overlap_param_gather=args.overlap_param_gather,
            ),
            dist=_Off(use_decentralized_pg=True),
            logger=_Off(skip_train_metrics_log=True),
            model=_Off(cuda_graph_impl="none", seq_length=args.seq_length),
            optimizer=_Off(use_distributed_optimizer=args.use_distributed_optimizer),
            train=_Off(
                empty_unused_memory_level=0,
                global_batch_size=args.global_batch_size,
                iterations_to_skip=[],
                manual_gc_interval=0,
                micro_batch_size=args.micro_batch_size,
                skip_sync_grad_norm_across_mp=True,
                train_iters=0,
                **train,
            ),
            validation=_Off(
                eval_global_batch_size=args.global_batch_size,
                eval_iters=1,
                eval_micro_batch_size=args.micro_batch_size,
            ),
        )
        # Up to 0.3 the options of an evaluation are among those of the training.
        vars(self.cfg.train).update(vars(self.cfg.validation))
        self.state = _Off(
            cfg=self.cfg,
            start_time=0.0,
            timers=self.timers,
            train_state=_Off(
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
        """Run one call of Bridge's `train`. All ranks take part."""
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
        """Run one call of Bridge's `train_step`."""
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        module, running = self._module("train"), self.program
        offered = {
            "forward_step_func": self.forward_step,
            "data_iterator": running.data[0],
            "model": running.chunks,
            "optimizer": running.optimizer,
            "scheduler": running.scheduler,
            "global_state": self.state,
            "pg_collection": self.groups,
            "forward_backward_func": get_forward_backward_func(),
            "p2p_communicator": P2PCommunicator(self.groups.pp, running.config),
        }
        parameters = inspect.signature(module.train_step).parameters
        return module.train_step(**{name: offered[name] for name in parameters if name in offered})

    def evaluate(self) -> Any:
        """Run one call of Bridge's `evaluate`."""
        module = self._module("eval")
        module.get_pg_collection.return_value = self.groups
        running = self.program
        return module.evaluate(
            self.state,
            self.forward_step,
            running.data[0],
            running.chunks,
            None,
            running.config,
        )

    def wire(self) -> None:
        """Do the last thing that Bridge's `setup` does."""
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
