"""Runs verl's own Megatron engine around a tiny model, for tests.

`train_batch`, `infer_batch`, the wiring and the modes are verl's; its data and losses are
stand-ins.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_idempotent.patches.frameworks import _standins
from megatron_idempotent.patches.frameworks._verl import ABSENT
from megatron_idempotent.patches.frameworks._workers import Windows, methods

#: verl's modules, inside of its package.
BASE = "workers.engine.base"
MODULE = "workers.engine.megatron.transformer_impl"
WIRING = "utils.megatron_utils"


def engine_of(base: Any, module: Any, bench: Any, **attributes: Any) -> Any:
    """Return verl's engine around a model, with what its modules compute on a device replaced.

    Args:
        base: verl's module of `BaseEngine`.
        module: verl's module of `MegatronEngine`.
        bench: the model's chunks, optimizer and configuration.
        attributes: further attributes of the engine, and methods in place of its own.
    """
    base.maybe_fix_3d_position_ids = lambda _: None
    base.get_device_name = module.get_device_name = lambda: "cuda"
    module.get_device_id = lambda: "cpu"
    return methods(
        base.BaseEngine,
        module.MegatronEngine,
        module=bench.chunks,
        optimizer=bench.optimizer,
        tf_config=bench.config,
        to=lambda **_: None,
        **attributes,
    )


class Verl(Windows):
    """Trains a model with verl's engine, which is as after `initialize`, with nothing offloaded."""

    def __init__(self, **layout: Any) -> None:
        import torch

        super().__init__(wire=False, **layout)
        _standins.replace("ray")
        names = (WIRING, BASE, MODULE)
        wiring, base, module = _standins.import_all("verl", names, *ABSENT).values()
        self.module = module
        bench = self.bench
        wiring.register_megatron_training_hooks(bench.chunks, bench.optimizer)
        module.tu.get_non_tensor_data = lambda data, key, default=None: default
        if hasattr(module, "RouterReplayHelper"):  # since 0.7; a stand-in, whose answers are true
            module.RouterReplayHelper.is_r2_record_action = lambda *_: False
        module.prepare_micro_batches = lambda data, **_: (data.rows, None)
        module.make_batch_generator = lambda rows, vpp_size: self.reading(rows)
        module.postprocess_batch_func = lambda output_lst, **_: {"metrics": {}}
        self.engine = engine_of(
            base,
            module,
            bench,
            model_config=SimpleNamespace(mtp=SimpleNamespace(enable=False)),
            engine_config=SimpleNamespace(
                context_parallel_size=1,
                dynamic_context_parallel=False,
                pad_bshd_to_minibatch_max=False,
            ),
            _is_offload_param=False,
            _is_offload_grad=False,
            _is_offload_optimizer=False,
            forward_step=self.forward_step,
            is_mp_src_rank_with_outputs=lambda: True,
        )
        self._modes = {"train": module.EngineTrainModeCtx, "eval": module.EngineEvalModeCtx}
        for mode in self._modes.values():
            mode.__enter__.__globals__["MegatronEngine"] = type(self.engine)
        self._ones = torch.ones(1)

    def train(self, seed: int) -> None:
        """Run one `train_batch` in training mode."""
        with self._modes["train"](self.engine):
            self.engine.train_batch(self._data(seed), None)

    def logprobs(self, seed: int) -> None:
        """Run one `infer_batch` in evaluation mode."""
        with self._modes["eval"](self.engine):
            self.engine.infer_batch(self._data(seed), None)

    def _data(self, seed: int) -> _Data:
        data = _Data(loss_mask=self._ones)
        data.rows = self.batches(seed)
        return data


class _Data(dict):  # type: ignore[type-arg]
    """Stands for a TensorDict, as the engine uses it."""

    rows: list[Any]
