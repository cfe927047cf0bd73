"""Holds functions that the case files about NeMo-RL's Megatron workers share.

`NemoRL` is for reproductions: it runs the workers around a tiny model. The workers, the forward and
backward, the timers and the decorators are NeMo-RL's, from the modules on the path. Its data,
metrics and weight transfer are stand-ins.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

from . import _standins
from ._workers import Windows, methods, weights_of

POLICY = "nemo_rl.models.policy.workers.megatron_policy_worker:MegatronPolicyWorkerImpl"
VALUE = "nemo_rl.models.value.workers.megatron_value_worker:MegatronValueWorkerImpl"
_ABSENT = ("megatron.bridge", "transformers")


class NemoRL(Windows):
    """Sets up one of NeMo-RL's Megatron workers around a tiny model, as after its `__init__`.

    Args:
        worker: `policy` or `value`.
        layout: arguments of `cpu.tiny.build`.

    Example:
        nemo = NemoRL(overlap_param_gather=True)
        nemo.train(0)
        nemo.logprobs(1)
    """

    def __init__(self, worker: str = "policy", **layout: Any) -> None:
        super().__init__(
            **{"config_overrides": {"calculate_per_token_loss": True}, "align": True, **layout}
        )
        from megatron.core import parallel_state

        (model,) = self.bench.chunks
        ddp = model.ddp_config
        self.module, worker_class = import_worker(worker)
        self._stand_in()
        self.worker = methods(
            worker_class,
            model=model,
            optimizer=self.bench.optimizer,
            scheduler=SimpleNamespace(
                get_lr=lambda _: 1e-3, get_wd=lambda: 0.0, step=lambda increment: None
            ),
            cfg=_Config(
                train_global_batch_size=parallel_state.get_data_parallel_world_size(),
                train_micro_batch_size=1,
                logprob_batch_size=1,
                max_total_sequence_length=1,
                sequence_packing={"enabled": False},
                megatron_cfg=_Config(
                    empty_unused_memory_level=0,
                    moe_per_layer_logging=False,
                    distributed_data_parallel_config={
                        "overlap_grad_reduce": ddp.overlap_grad_reduce
                    },
                ),
            ),
            rank=0,
            dp_size=1,
            refit_conversion_tasks=[],
            should_disable_forward_pre_hook=ddp.overlap_param_gather,
            mcore_state=_standins.Off(
                cfg=SimpleNamespace(
                    checkpoint=_standins.Off(), model=SimpleNamespace(seq_length=1)
                ),
                train_state=SimpleNamespace(floating_point_operations_so_far=0),
            ),
            megatron_cfg=_standins.Off(),
            megatron_bridge=SimpleNamespace(export_hf_weights=weights_of),
            _policy_like_cfg={"sequence_packing": {"enabled": False}},
        )
        if worker == "policy":
            self.worker.timer = _standins.import_alone("nemo_rl.utils.timer").Timer()
            self.worker._collect_mtp_metrics = lambda *_: None

    def train(self, seed: int, *, eval_mode: bool = False) -> Any:
        """Run one call of the worker's `train` on data drawn with `seed`.
        Unless `eval_mode`, the worker takes an optimizer step.
        """
        return self.worker.train(self._data(seed), self._loss_of, eval_mode=eval_mode)

    def begin(self) -> None:
        """Run one call of the policy worker's `begin_train_step`."""
        self.worker.begin_train_step(self._loss_of)

    def chunk(self, seed: int) -> None:
        """Run one call of the policy worker's `train_microbatch` on data drawn with `seed`."""
        self.worker.train_microbatch(self._data(seed))

    def logprobs(self, seed: int) -> bytes:
        """Return the bytes of the policy worker's `get_logprobs` on data drawn with `seed`."""
        return _bits(self.worker.get_logprobs(data=self._data(seed))["logprobs"])

    def reference(self, seed: int) -> bytes:
        """Return the bytes of the worker's `get_reference_policy_logprobs` on data drawn with
        `seed`.
        """
        result = self.worker.get_reference_policy_logprobs(data=self._data(seed))
        return _bits(result["reference_logprobs"])

    def values(self, seed: int) -> bytes:
        """Return the bytes of the value worker's `get_values` on data drawn with `seed`."""
        return _bits(self.worker.get_values(self._data(seed))["values"])

    def exported(self) -> bytes:
        """Return the bytes of the weights that the policy worker exports to inference engines."""
        import torch

        with torch.no_grad():
            pairs = list(self.worker._iter_params_with_optional_kv_scales())
        return b"".join(_bits(tensor) for _, tensor in pairs)

    def remember_reference(self) -> None:
        """Set the worker's reference weights to a copy of the policy's, each multiplied by 0.5."""
        self.worker.reference_state_dict = {
            name: item.detach().clone() * 0.5
            for name, item in self.worker.model.state_dict().items()
            if hasattr(item, "detach")
        }

    def _data(self, seed: int) -> Any:
        import torch

        batches = self.batches(seed)
        data = _Data(
            input_ids=torch.cat([batch["tokens"] for batch in batches]),
            sample_mask=torch.ones(len(batches)),
        )
        data.size, data.microbatches = 1, batches
        return data

    def _loss_of(self, logits_BTV: Any, tokens_BT: Any, tokens: Any) -> tuple[Any, dict[str, Any]]:
        loss = self.loss(logits_BTV, tokens_BT) / tokens
        return loss, {"loss": loss.detach().clone()}

    def _iterator(self, data: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
        from megatron_idempotent.proof.cpu import tiny

        rows = [_microbatch(batch) for batch in data.microbatches]
        return self.reading(rows), len(rows), tiny.BATCH, tiny.SEQUENCE, tiny.SEQUENCE

    def _stand_in(self) -> None:
        import torch

        sequences = torch.tensor(1.0)
        vars(self.module).update(
            BatchedDataDict=_Data,
            get_microbatch_iterator=self._iterator,
            process_global_batch=lambda data, **_: {
                "batch": data,
                "global_valid_seqs": sequences,
                "global_valid_toks": torch.tensor(2.0),
            },
            logical_and_across_model_parallel_group=lambda value, **_: value,
            reduce_max_stat_across_model_parallel_group=lambda value, **_: value,
            broadcast_loss_metrics_from_last_stage=lambda value: value,
            broadcast_tensors_from_last_stage=lambda value: value,
        )
        train = _standins.import_alone("nemo_rl.models.megatron.train")
        train.wrap_loss_fn_with_input_preparation = (
            lambda logits_BTV, *, loss_fn, data, global_valid_toks, **_: loss_fn(
                logits_BTV, data["input_ids"], global_valid_toks
            )
        )
        train.get_capture_context = lambda *_: (contextlib.nullcontext(), None)
        train.need_top_k_or_top_p_filtering = lambda _: False
        train.from_parallel_logits_to_logprobs = lambda logits_BTV, *, target, **_: self.measured(
            logits_BTV, target
        )[1]


class _Config(dict):  # type: ignore[type-arg]
    """Stands in for a configuration of NeMo-RL, which is a dictionary."""


class _Data(dict):  # type: ignore[type-arg]
    """Stands in for NeMo-RL's `BatchedDataDict`, with the methods that its workers use."""

    size: int
    microbatches: list[Any]

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def get_multimodal_dict(self, **_: Any) -> dict[str, Any]:
        return {}

    def to(self, _: str) -> _Data:
        return self


def import_worker(worker: str) -> tuple[Any, type]:
    """Import the module of NeMo-RL's policy or value worker; return the module and the class."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    for name in ("FullyShardedDataParallelV1", "FullyShardedDataParallelV2"):
        if not hasattr(mcore_fsdp_adapter, name):  # up to 0.19 there is a single class
            setattr(mcore_fsdp_adapter, name, type(name, (), {}))
    _standins.replace("ray")  # ray would fail to make an actor of a class whose bases are stand-ins
    names = ("utils.nsys", "utils.timer", "models.megatron.train")
    _standins.import_all("nemo_rl", names, *_ABSENT)
    module_name, _, class_name = {"policy": POLICY, "value": VALUE}[worker].partition(":")
    module = _standins.import_alone(module_name, *_ABSENT)
    return module, getattr(module, class_name)


def _microbatch(batch: dict[str, Any]) -> Any:
    return _standins.Off(
        data_dict=_Data(input_ids=batch["tokens"]),
        input_ids=batch["tokens"],
        input_ids_cp_sharded=batch["tokens"],
        attention_mask=batch["mask"],
        position_ids=batch["positions"],
    )


def _bits(tensor: Any) -> bytes:
    bits: bytes = tensor.detach().float().numpy().tobytes()
    return bits
