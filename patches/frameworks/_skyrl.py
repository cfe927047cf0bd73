"""Holds functions that the case files about SkyRL's Megatron worker share.

`SkyRL` is for reproductions: it runs SkyRL's own model wrapper and `optim_step` around a tiny
model. The rest of its worker, its data and its losses are stand-ins.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from . import _standins
from ._workers import MICROBATCHES, Windows, methods, weights_of

_PACKAGE = "skyrl.backends.skyrl_train"
WORKERS = f"{_PACKAGE}.workers.megatron"
WRAPPER = f"{WORKERS}.megatron_model_wrapper:MegatronModelWrapper"
ABSENT = ("megatron.bridge", "transformers", "omegaconf", "loguru", "huggingface_hub", "peft")


class SkyRL(Windows):
    """Sets up SkyRL's Megatron worker around a tiny model, as after its `init_model`.

    Example:
        skyrl = SkyRL()
        skyrl.forward_backward(0)
        skyrl.forward_backward(1)
        skyrl.step()
    """

    def __init__(self, **layout: Any) -> None:
        super().__init__(**layout)
        _standins.replace("ray")
        self.module = _standins.import_alone(WRAPPER.split(":")[0], *ABSENT)
        self._stand_in()
        cfg = _standins.Off(
            policy=SimpleNamespace(megatron_config=_standins.Off(mtp_loss_weight=0.0)),
            algorithm=SimpleNamespace(policy_loss_type="cross_entropy"),
        )
        bench = self.bench
        bench.config.no_sync_func = None  # SkyRL sets none
        self.model = self.module.MegatronModelWrapper(
            cfg, bench.chunks, bench.optimizer, self._policy_loss
        )
        worker = _standins.import_alone(f"{WORKERS}.megatron_worker", *ABSENT)
        worker.WeightChunk = SimpleNamespace
        self.worker = methods(
            worker.MegatronPolicyWorkerBase,
            model=self.model,
            actor_module=bench.chunks,
            optimizer=bench.optimizer,
            strategy=SimpleNamespace(optimizer_step=optimizer_step),
        )
        self.exporter = methods(
            worker.MegatronWeightExtractor,
            actor_module=bench.chunks,
            bridge=SimpleNamespace(export_hf_weights=weights_of),
            _ensure_buckets_initialized=lambda: None,
        )

    def forward_backward(self, seed: int) -> None:
        """Run one training call of SkyRL's `forward_backward_mini_batch` on the data of `seed`."""
        self.model.train()
        self._call(seed, forward_only=False)

    def train(self, seed: int) -> None:
        """Run one call of SkyRL's `forward_backward`, and then one optimizer step."""
        self.forward_backward(seed)
        self.step()

    def step(self) -> float | None:
        """Run one call of the worker's `optim_step`, and return its gradient norm."""
        norm: float | None = self.worker.optim_step()
        return norm

    def logprobs(self, seed: int) -> None:
        """Run a forward-only call in eval mode, as SkyRL does for log-probs."""
        import torch

        self.model.eval()
        with torch.no_grad():
            self._call(seed, forward_only=True)

    def exported(self) -> bytes:
        """Return the bytes of the weights that SkyRL's worker exports to inference engines."""
        import torch

        with torch.no_grad():
            chunks = list(self.exporter.extract_weights(torch.float32))
        return b"".join(t.detach().numpy().tobytes() for chunk in chunks for t in chunk.tensors)

    def _call(self, seed: int, *, forward_only: bool) -> None:
        from megatron_idempotent.proof.cpu import tiny

        self.model.forward_backward_mini_batch(
            micro_batches=[_microbatch(batch) for batch in self.batches(seed)],
            seq_len=tiny.SEQUENCE,
            micro_batch_size=tiny.BATCH,
            forward_only=forward_only,
            return_per_token_outputs=False,
        )

    def _stand_in(self) -> None:
        import torch
        from megatron.core.utils import get_model_config

        module = self.module
        module.get_model_config = get_model_config
        module.make_batch_generator = lambda batches, vpp_size: self.reading(batches)
        module._copy_tensor_dict_to_device = lambda batch, _: dict(batch)
        module.is_fp8_enabled = lambda _: False
        module.remove_left_padding = lambda tokens_BT, mask, positions_BT, **_: (
            tokens_BT,
            torch.ones(1, 1, *[tokens_BT.shape[1]] * 2).tril() < 0.5,
            positions_BT,
        )
        module.to_te_attention_mask = lambda mask: mask
        module.recover_left_padding = lambda outputs, *_, **__: outputs
        module.from_parallel_logits_to_logprobs = self._logprobs_of
        self._policy_loss: Any = lambda *_, **__: (self._last, {})
        module.PolicyLossRegistry.get = lambda _: self._policy_loss

    def _logprobs_of(self, logits_BTV: Any, tokens_BT: Any, **_: Any) -> Any:
        self._last, logprobs_BT = self.measured(logits_BTV, tokens_BT)
        return logprobs_BT


STRATEGY = f"{_PACKAGE}.distributed.megatron.megatron_strategy"
_HOLDER = "megatron.core.dist_checkpointing.strategies.base"


def import_strategy() -> Any:
    """Import SkyRL's module of `MegatronStrategy`, and return it.
    A stand-in replaces the module of Megatron's save queue where this Megatron lacks it.

    SkyRL imports Megatron's save queue from a module that exists up to megatron-core 0.18.
    """
    from megatron.core.dist_checkpointing import strategies

    _standins.replace("ray")
    if _HOLDER not in sys.modules and importlib.util.find_spec(_HOLDER) is None:
        sys.modules[_HOLDER] = strategies.base = ModuleType(_HOLDER)
    absent = (*ABSENT, "jaxtyping", "s3fs", "botocore", "boto3")
    names = (
        "utils.io.s3fs",
        "utils.io.io",
        "distributed.megatron.megatron_utils",
        "distributed.strategy",
        "distributed.megatron.megatron_strategy",
    )
    modules = _standins.import_all(_PACKAGE, names, *absent)
    module = modules["distributed.megatron.megatron_strategy"]
    module.io = modules["utils.io.io"]
    return module


def strategy_of(chunks: list[Any]) -> tuple[Any, Any]:
    """Return an instance of SkyRL's `MegatronStrategy`, and a stand-in for SkyRL's model.
    The stand-in holds `chunks`, which the strategy can save and load.
    """
    config = SimpleNamespace(
        dist_ckpt_optim_fully_reshardable=False,
        async_dist_ckpt_save=False,
        async_dist_ckpt_strategy="mcore",
        async_save_prestage_to_cpu=False,
    )
    strategy = import_strategy().MegatronStrategy(config)
    strategy.hf_config = SimpleNamespace(save_pretrained=lambda _: None)
    strategy.print = lambda *_: None
    return strategy, SimpleNamespace(actor_module=chunks)


def optimizer_step(optimizer: Any, model: Any, scheduler: Any, name: str) -> Any:
    """Take an optimizer step, zero the gradients, and return the gradient norm.
    This function replaces the step of SkyRL's strategy, and calls no scheduler.
    """
    _, norm, _ = optimizer.step()
    optimizer.zero_grad()
    return norm


def _microbatch(batch: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {
        "sequences": batch["tokens"],
        "attention_mask": torch.ones_like(batch["tokens"]),
        "position_ids": batch["positions"],
        "num_actions": batch["tokens"].shape[1] - 1,
        "num_microbatches": MICROBATCHES,
        **dict.fromkeys(("old_action_log_probs", "base_action_log_probs", "advantages")),
        **dict.fromkeys(("loss_mask", "rollout_action_logprobs", "rollout_expert_indices")),
    }
