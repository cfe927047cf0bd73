"""Holds functions that the case files about ROLL's Megatron strategy share.

`Roll` is for reproductions: it runs ROLL's own `train_step` around a tiny model. Its data, and the
forward step of a microbatch, are stand-ins.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from . import _standins
from ._workers import MICROBATCHES, Windows, methods

MODULE = "roll.distributed.strategy.megatron_strategy"
_ABSENT = ("codetiming", "transformers", "datasets", "tensordict", "peft")


class Roll(Windows):
    """Sets up ROLL's Megatron strategy around a tiny model, as after its `initialize`.

    Example:
        roll = Roll(overlap_param_gather=True)
        roll.train(0)
    """

    def __init__(self, **layout: Any) -> None:
        super().__init__(**layout)
        _standins.replace("ray", "mcore_adapter")  # mcore_adapter is a folder of the checkout
        self.module = _standins.import_alone(MODULE, *_ABSENT)
        bench = self.bench
        for name in ("make_micro_batch_iter_for_dynamic_batching", "append_to_dict"):
            setattr(self.module, name, lambda *_: None)
        self.strategy = methods(
            self.module.MegatronTrainStrategy,
            model=_Models(bench.chunks, bench.config),
            optimizer=bench.optimizer,
            scheduler=SimpleNamespace(step=lambda: None),
            seq_length=bench.chunks[0].module.max_sequence_length,
            worker_config=SimpleNamespace(
                name="actor",
                use_dynamic_batching_in_train=False,
                training_args=SimpleNamespace(per_device_train_batch_size=1),
            ),
            megatron_train_args=SimpleNamespace(gradient_accumulation_steps=MICROBATCHES),
            forward_backward_func=self._forward_backward,
            inner_forward_step=lambda _, data, model: self.forward_step(
                (row.row for row in data), model
            ),
            load_states=lambda **_: None,
            offload_states=lambda **_: None,
            _get_batch_num_tokens=lambda *_, **__: 1,
            _get_global_valid_samples=lambda *_, **__: 1,
        )

    def train(self, seed: int) -> None:
        """Run one call of the strategy's `train_step` on the data of `seed`."""
        rows = [
            SimpleNamespace(meta_info={}, batch=SimpleNamespace(batch_size=[1]), row=batch)
            for batch in self.batches(seed)
        ]
        batch = SimpleNamespace(
            meta_info={},
            batch=SimpleNamespace(batch_size=[MICROBATCHES]),
            chunk=lambda chunks: rows,
        )
        self.strategy.train_step(batch, None)

    def _forward_backward(self, *, data_iterator: Any, **call: Any) -> Any:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        data = [self.reading(list(batches)) for batches in data_iterator]
        return get_forward_backward_func()(data_iterator=data, **call)


class _Models(list):  # type: ignore[type-arg]
    """Stands in for mcore_adapter's list of model chunks, with the methods that ROLL uses."""

    def __init__(self, chunks: list[Any], config: Any) -> None:
        super().__init__(chunks)
        self.config = config

    def get_models(self) -> list[Any]:
        return list(self)

    def train(self) -> None:
        for chunk in self:
            chunk.train()
