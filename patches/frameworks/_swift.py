"""Stands for a Megatron trainer of ms-swift around its own methods, for reproductions and tests."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from . import _standins
from ._workers import MICROBATCHES, Windows, methods

_ABSENT = ("mcore_bridge", "modelscope", "transformers")


def trainer(method: str, options: Sequence[str]) -> Any:
    """Return a stand-in for a trainer, with ms-swift's own `method` as `call`.

    Args:
        method: the name of a method of `BaseMegatronTrainer`.
        options: options of Megatron, as on a command line.
    """
    from megatron_idempotent.proof.cpu import program

    running = program.start(options)
    running.args.is_multimodal = running.args.nccl_comm_warmup = False
    module = _standins.import_alone("swift.megatron.trainers.base", *_ABSENT)
    made = SimpleNamespace(
        args=running.args,
        config=running.config,
        optimizer=running.optimizer,
        state=SimpleNamespace(iteration=running.args.train_iters),
        wrapped_models=running.chunks,
        call_event=lambda name: None,
        _prepare_data_iterator=lambda *datasets: (None, None),
    )
    made.call = lambda *args: getattr(module.BaseMegatronTrainer, method)(made, *args)
    return made


class Swift(Windows):
    """Trains and evaluates a model with `train_step` and `evaluate` of ms-swift's trainer."""

    def __init__(self, **layout: Any) -> None:
        from megatron_idempotent.proof.cpu import tiny

        super().__init__(**layout)
        module = _standins.import_alone("swift.megatron.trainers.base", *_ABSENT)
        module.logical_and_across_model_parallel_group = lambda value: value
        module.reduce_max_stat_across_model_parallel_group = lambda value: value
        self.trainer = methods(
            module.BaseMegatronTrainer,
            args=SimpleNamespace(
                num_microbatches=MICROBATCHES,
                seq_length=tiny.SEQUENCE,
                micro_batch_size=tiny.BATCH,
                global_batch_size=1,
                eval_iters=1,
            ),
            wrapped_models=self.bench.chunks,
            optimizer=self.bench.optimizer,
            opt_param_scheduler=SimpleNamespace(step=lambda increment: None),
            enable_routing_replay=False,
            eval_metrics=None,
            forward_step=self.forward_step,
            call_event=lambda _: None,
            on_log=lambda **_: None,
            _aggregated_metrics=lambda *_: None,
        )

    def train(self, seed: int) -> None:
        """Run one `train_step`, in training mode."""
        for chunk in self.bench.chunks:
            chunk.train()
        self.trainer.train_step(self._data(seed))

    def logprobs(self, seed: int) -> None:
        """Run one `evaluate`."""
        self.trainer.evaluate(self._data(seed))

    def _data(self, seed: int) -> Any:
        return self.reading(self.batches(seed))
