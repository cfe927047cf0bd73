"""Runs the trainer of ms-swift with a small model, and small data and losses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_idempotent.patches.frameworks._swift import import_trainers
from megatron_idempotent.patches.frameworks._workers import MICROBATCHES, Windows, methods


class Swift(Windows):
    """Trains and evaluates a model with `train_step` and `evaluate` of ms-swift's trainer."""

    def __init__(self, **layout: Any) -> None:
        from megatron_idempotent.proof.cpu import tiny

        super().__init__(**layout)
        module = import_trainers()
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
