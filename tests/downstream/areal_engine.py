"""Runs AReaL's own Megatron engine around a tiny model, for tests.

`_create_optimizer`, `train_batch` and `forward_backward_batch` are AReaL's; its data, and the loss
of a microbatch, are stand-ins.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron_idempotent.patches.frameworks import _standins
from megatron_idempotent.patches.frameworks._workers import MICROBATCHES, Windows, methods

MODULE = "areal.engine.megatron_engine"
_ABSENT = (
    "mbridge",
    "megatron.bridge",
    "transformers",
    "torch_memory_saver",
    "torchdata",
    "datasets",
    "peft",
)


class Areal(Windows):
    """Trains a model with AReaL's engine, which is as after `initialize`.

    Args:
        dtype: the type of the parameters, as `cpu.tiny.build` takes it.
        loss_scale: the scale of the optimizer's scaler at the start.
    """

    def __init__(self, *, dtype: str = "fp32", loss_scale: float = 1.0, **layout: Any) -> None:
        from megatron.core.distributed import finalize_model_grads

        super().__init__(dtype=dtype, with_optimizer=False, wire=False, **layout)
        _standins.replace("ray")
        self.module = module = _standins.import_alone(MODULE, *_ABSENT)
        bench = self.bench
        (chunk,) = bench.chunks
        module.packed_context_parallel_forward = self._forward
        module.unpad_logits = lambda output, **_: output
        module.compute_total_loss_weight = lambda *_: MICROBATCHES
        ddp = chunk.ddp_config
        self.engine = methods(
            module.MegatronEngine,
            model=bench.chunks,
            config=SimpleNamespace(use_lora=False),
            dtype={"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32),
            device="cpu",
            enable_fp8=False,
            enable_tree_training=False,
            is_vision_model=False,
            is_offload=False,
            optimizer_config=SimpleNamespace(
                type="adam",
                lr=1e-3,
                min_lr_ratio=1.0,
                weight_decay=0.0,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                gradient_clipping=1.0,
                warmup_steps_proportion=0.0,
                lr_scheduler_type="constant",
            ),
            mcore_config=SimpleNamespace(
                ddp=ddp,
                overlap_param_gather_with_optimizer_step=False,
                use_precision_aware_optimizer=False,
                use_checkpoint_opt_param_scheduler=False,
                async_save=False,
                main_grads_dtype="float32",
                main_params_dtype="float32",
                exp_avg_dtype="float32",
                exp_avg_sq_dtype="float32",
            ),
            _normalize_batch_input=lambda batch: (batch, None),
            _prepare_mb_list=lambda batch: batch,
            _compute_logprobs_and_loss=self._weigh,
        )
        if ddp.overlap_grad_reduce:
            bench.config.no_sync_func = chunk.no_sync
        bench.config.finalize_model_grads_func = finalize_model_grads
        self.engine._create_optimizer(SimpleNamespace(total_train_steps=1000))
        bench.optimizer = self.engine.optimizer
        for part in getattr(bench.optimizer, "chained_optimizers", [bench.optimizer]):
            if getattr(part, "grad_scaler", None) is not None:
                part.grad_scaler._scale.fill_(loss_scale)

    def train(self, seed: int) -> float:
        """Run one call of the engine's `train_batch`, and return its gradient norm."""
        found: float = self.engine.train_batch(self._batch(seed), None, None)["grad_norm"]
        return found

    def logprobs(self, seed: int) -> None:
        """Run a forward-only call of the engine's `forward_backward_batch`."""
        with torch.no_grad():
            self.engine.forward_backward_batch(self._batch(seed), self._measure, forward_only=True)

    def _batch(self, seed: int) -> _Batch:
        rows = [
            SimpleNamespace(padded_mb=batch, orig_mb=batch, padding_length=0, old_cu_seqlens=None)
            for batch in self.batches(seed)
        ]
        return _Batch(self, rows)

    def _forward(self, model: Any, row: dict[str, Any], **_: Any) -> Any:
        return model(row["tokens"], row["positions"], row["mask"])

    def _measure(self, output: Any, row: dict[str, Any]) -> Any:
        return self.loss(output, row["tokens"])

    def _weigh(
        self,
        output: Any,
        row: dict[str, Any],
        loss_fn: Any,
        weight_fn: Any,
        total: float,
        loss_multiplier: float,
    ) -> Any:
        return self._measure(output, row) / total * loss_multiplier


class _Batch:
    """Stands for AReaL's `MicroBatchList`, as the engine uses it."""

    max_seqlen = 32

    def __init__(self, areal: Areal, rows: list[Any]) -> None:
        self._areal, self.mbs = areal, rows

    def __len__(self) -> int:
        return len(self.mbs)

    def __iter__(self) -> Any:
        return self._areal.reading(self.mbs)

    def to(self, _: str) -> _Batch:
        return self
