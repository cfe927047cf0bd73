"""Megatron-Bridge's own `train_step`, wiring and loss on a rank.

Bridge does not import without CUDA, so the rest of it are stand-ins.

Legend: B rows, T positions.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from adapters import import_from
from megatron_idempotent.patches.frameworks import _bridge, _standins

_REAL = (
    "training",  # with a recipe's lines, which have to come before Megatron
    "data.iterator_utils",
    "training.utils.train_utils",
    "training.losses",
)


def modules(source: str) -> Any:
    """Import Bridge's own modules; return that of the losses."""
    return import_from(source, "megatron.bridge", _REAL, "modelopt")["training.losses"]


class BridgeWorker(_bridge.Bridge):
    """Bridge around the chunks and the optimizer of `subject`, as after its `setup()`.

    `forward_step` is a function of a data iterator and a chunk, as Megatron has it.

    Example: `BridgeWorker(source, subject, forward_step).take([rows])`
    """

    def __init__(self, source: str, subject: Any, forward_step: Any) -> None:
        from megatron.core import num_microbatches_calculator, parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.timers import Timers

        self.losses = modules(source)
        self.calculator = num_microbatches_calculator
        self.replicas = parallel_state.get_data_parallel_world_size()
        self.forward_step = forward_step
        self.timers = Timers(0, "minmax")
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.program = SimpleNamespace(
            chunks=subject.chunks,
            config=subject.config,
            data=[None],
            optimizer=subject.optimizer,
            scheduler=_standins.Thing(),
        )
        size = subject.micro_batch_size
        ddp = subject.chunks[0].ddp_config
        train = {"check_optimizer_step_success": True, "empty_unused_memory_level": 0}
        self.cfg = _standins.Off(
            data_parallel_size=self.replicas,
            dataset=_standins.Off(dataloader_type="single"),
            ddp=ddp,
            dist=_standins.Off(use_decentralized_pg=True),
            model=_standins.Off(cuda_graph_impl="none"),
            optimizer=_standins.Off(),
            train=_standins.Off(micro_batch_size=size, **train),
        )
        self.state = _standins.Off(cfg=self.cfg, timers=self.timers)
        self.calculator.unset_num_microbatches_calculator()  # of an earlier set-up
        self._plan(self.calculator.init_num_microbatches_calculator, 1)
        self.wire()

    def take(self, microbatches: list[Any]) -> tuple[Any, ...]:
        """Run one call of Bridge's `train_step`; return what it does. All ranks take part."""
        self._plan(self.calculator.reconfigure_num_microbatches_calculator, len(microbatches))
        self.program.config.seq_length = microbatches[0]["input_ids"].shape[1]
        self.program.data = [iter(microbatches)]
        found: tuple[Any, ...] = self.step()
        return found

    def _plan(self, set_up: Any, number: int) -> None:
        size = self.cfg.train.micro_batch_size
        set_up(0, None, number * size * self.replicas, size, self.replicas)
