"""SkyRL's model wrapper and `optim_step` on a rank, with its own losses and log-probs.

Legend: B rows, T positions, A positions of the answer.
"""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import torch
from adapters import PACKED, import_from
from megatron_idempotent.patches.frameworks import _skyrl, _standins
from megatron_idempotent.patches.frameworks._workers import methods

from megatron_idempotent.proof.cpu import tiny

ANSWER = 16
_REAL = (
    "backends.skyrl_train.utils.torch_utils",
    "backends.skyrl_train.utils.off_policy_correction_utils",
    "backends.skyrl_train.utils.ppo_utils",
    "backends.skyrl_train.distributed.megatron.packing_utils",
    "backends.skyrl_train.distributed.megatron.token_metadata",
    "backends.skyrl_train.distributed.megatron.megatron_utils",
    "backends.skyrl_train.distributed.megatron.model_utils",
    "backends.skyrl_train.utils.replay_utils",
    "backends.skyrl_train.training_batch",
    "train.dataset.replay_buffer",
    "backends.skyrl_train.workers.worker_utils",
    "backends.skyrl_train.workers.megatron.megatron_model_wrapper",
    "backends.skyrl_train.workers.megatron.megatron_worker",
)


def modules(source: str) -> tuple[Any, Any]:
    """SkyRL's modules of the wrapper and of the worker, with all that they compute with."""
    imported = import_from(source, "skyrl", _REAL, *_skyrl.ABSENT, "jaxtyping")
    wrapper, worker = (imported[name] for name in _REAL[-2:])
    wrapper.router_replay_schedule = lambda *_: contextlib.nullcontext()
    wrapper.to_te_attention_mask = lambda keep_BT: None if keep_BT is None else _causal(keep_BT)
    return wrapper, worker


class SkyWorker:
    """The worker around a small model; an adapter's module makes it use that.

    Example: `SkyWorker(source).step(seed=0, calls=(4, 4))`
    """

    def __init__(
        self,
        source: str,
        adapter: Any = None,
        *,
        packed: bool = False,
        subject: Any = None,
        **layout: Any,
    ) -> None:
        """Take the chunks and the optimizer of `subject`, or build a small model of a layout."""
        from megatron.core import parallel_state

        wrapper, worker = modules(source)
        self.packed = packed
        if packed:
            layout = {**PACKED, **layout}
        self.bench = bench = subject or tiny.build(**layout)
        bench.config.no_sync_func = None  # SkyRL sets none
        self.replica = parallel_state.get_data_parallel_rank()
        made = wrapper.MegatronModelWrapper if adapter is None else adapter.StepModelWrapper
        ours = sys.modules["skyrl.backends.skyrl_train.utils.ppo_utils"]
        self.losses = ours.PolicyLossRegistry
        self.model = made(
            config=_config(packed),
            actor_module=bench.chunks,
            actor_optimizer=bench.optimizer,
            policy_loss_fn=self.losses.get("regular"),
        )
        bases = [
            worker.MegatronWorker,
            worker.MegatronPolicyWorkerBase,
            *([adapter.StepWorker] if adapter else []),
        ]
        self.worker = methods(
            *bases,
            model=self.model,
            actor_module=bench.chunks,
            optimizer=bench.optimizer,
            scheduler=SimpleNamespace(step=lambda increment: None),
            strategy=SimpleNamespace(
                all_reduce=lambda metrics, *_, **__: metrics, optimizer_step=_skyrl.optimizer_step
            ),
            cfg=self.model.cfg,
            empty_cuda_cache=False,
            enable_router_replay=False,
        )

    def forward_backward(
        self, seed: int, number: int, *, loss_fn: str | None = None, forward_only: bool = False
    ) -> list[dict[str, Any]]:
        """One call, with so many microbatches."""
        found: list[dict[str, Any]] = self.model.forward_backward_mini_batch(
            [self._microbatch(100 * seed + index, number) for index in range(number)],
            tiny.SEQUENCE,
            tiny.BATCH,
            loss_fn=loss_fn,
            forward_only=forward_only,
        )
        return found

    def call(self, answer: int, **fields: Any) -> None:
        """Run the worker's own `forward_backward` on rows [B, T], of which so many are answers."""
        batch = sys.modules["skyrl.backends.skyrl_train.training_batch"].TrainingInputBatch(fields)
        batch.metadata = {"response_length": answer}
        self.worker.forward_backward(batch)

    def step(
        self, seed: int, calls: tuple[int, ...], **options: Any
    ) -> tuple[float | None, list[Any]]:
        """A window of calls, and its step: the norm, and what each microbatch reported."""
        self.model.train()
        found: list[Any] = []
        for index, number in enumerate(calls):
            found += self.forward_backward(10 * seed + index, number, **options)
        return self.worker.optim_step(), found

    def parameters(self) -> bytes:
        bits: bytes = self.bench.bits()
        return bits

    def _microbatch(self, seed: int, number: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(2 * seed + self.replica)
        shape = tiny.BATCH, ANSWER
        tokens_BT = torch.randint(0, tiny.VOCABULARY, (tiny.BATCH, tiny.SEQUENCE), generator=draw)
        logprobs_BA = -4 - torch.rand(shape, generator=draw)
        loss_mask_BA = (torch.rand(shape, generator=draw) < 0.7).float()
        keep_BT = torch.ones_like(tokens_BT)
        if self.packed:  # prompts are padded on their left, answers on their right
            bounds = torch.randint(0, 10, (2, tiny.BATCH, 1), generator=draw)
            positions_T = torch.arange(tiny.SEQUENCE)
            keep_BT *= (positions_T >= bounds[0]) & (positions_T < tiny.SEQUENCE - bounds[1])
            loss_mask_BA *= keep_BT[:, -ANSWER:]
        return {
            "sequences": tokens_BT,
            "attention_mask": keep_BT,
            "position_ids": torch.arange(tiny.SEQUENCE).expand(tiny.BATCH, -1),
            "num_actions": ANSWER,
            "old_action_log_probs": logprobs_BA,
            "base_action_log_probs": logprobs_BA - 0.1 * torch.rand(shape, generator=draw),
            "advantages": torch.randn(shape, generator=draw) / 64,
            "loss_mask": loss_mask_BA,
            "response_mask": torch.ones(shape),
            "rollout_action_logprobs": None,
            "rollout_expert_indices": None,
            "num_microbatches": number,
        }


def _config(packed: bool) -> Any:
    algorithm = SimpleNamespace(
        temperature=1.0,
        policy_loss_type="regular",
        eps_clip_low=0.2,
        eps_clip_high=0.2,
        off_policy_correction=_standins.Off(),
        use_entropy_loss=False,
        use_kl_loss=True,
        kl_loss_coef=0.01,
        kl_estimator_type="k3",
        loss_reduction="token_mean",
    )
    megatron = SimpleNamespace(mtp_loss_weight=0.0, mtp_loss_chunk_size=None, mtp_loss_topk=None)
    return SimpleNamespace(
        max_tokens_per_microbatch=0,
        micro_train_batch_size_per_gpu=tiny.BATCH,
        remove_microbatch_padding=packed,
        logprobs_chunk_size=None,
        vocab_entropy_chunk_size=None,
        vocab_entropy_chunk_memory_mb=None,
        policy=SimpleNamespace(megatron_config=megatron),
        algorithm=algorithm,
    )


def _causal(keep_BT: Any) -> Any:
    positions = keep_BT.shape[1]
    later = torch.ones(1, 1, positions, positions).tril() < 0.5
    return later | ~keep_BT.bool()[:, None, None, :]
