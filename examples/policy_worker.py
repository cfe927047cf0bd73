"""Define the policy on each rank of `asynchronous.py`: Megatron's model and optimizer, `TrainStep`.

The worker's methods are called by name, on all ranks at once. `Exports` adds methods for export.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from transformers import AutoConfig

import megatron_idempotent
from megatron_idempotent.rl.controller import StepOutcome
from megatron_idempotent.rl.hf import Architecture, MegatronWeights, build_gpt
from megatron_idempotent.rl.sync import Exports

SIZES = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
MODEL = AutoConfig.for_model("qwen3", architectures=["Qwen3ForCausalLM"], **SIZES, **HEADS)


class PolicyGradient:
    """Sums -ratio · advantage over sampled tokens; `TrainStep` divides by the sequences' count."""

    kind, normalizers = "sequence", {"ratio": "sequences"}

    def __call__(self, logits: Any, rows: Any) -> tuple[Any, dict[str, Any]]:
        targets = megatron_idempotent.logprobs.shift_targets(rows["input_ids"])
        stats = megatron_idempotent.token_logprobs(logits=logits, targets=targets)
        ratio = (stats.logprob[:, -1 - rows["logprobs"].shape[1] : -1] - rows["logprobs"]).exp()
        return -(ratio * rows["advantages"]).sum(), {"ratio": ratio.detach().mean(1).sum()}


class Worker(Exports):
    """Trains a replica of the model on each rank, with this rank's rows of each batch."""

    def __init__(self, sequences: int) -> None:
        from megatron.core import distributed, optimizer, parallel_state, tensor_parallel

        megatron_idempotent.apply()
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        arch, shared = Architecture.of(MODEL.to_dict()), {"use_distributed_optimizer": True}
        model = build_gpt(arch, arch.transformer_config()).cuda()
        ddp = distributed.DistributedDataParallelConfig(overlap_grad_reduce=True, **shared)
        chunks = [distributed.DistributedDataParallel(model.config, ddp, model)]
        adam = optimizer.OptimizerConfig(optimizer="adam", lr=2e-2, **shared)
        parts = chunks, optimizer.get_megatron_optimizer(adam, chunks)
        megatron_idempotent.wire_train_config(*parts)
        self.step = megatron_idempotent.TrainStep(*parts)
        self.sizes = {"global_batch_size": sequences, "micro_batch_size": 16}
        super().__init__(MegatronWeights(chunks, arch))

    def begin(self, step_id: str) -> None:
        self.step.begin(PolicyGradient(), step_id=step_id, **self.sizes)

    def microbatch(self, step_id: str, rows: dict[str, Any], options: dict[str, Any]) -> None:
        mine = {k: v[dist.get_rank() :: dist.get_world_size()].cuda() for k, v in rows.items()}
        self.step.microbatch(step_id, mine, **options)

    def finish(self, step_id: str) -> StepOutcome:
        done = self.step.finish(step_id)
        return StepOutcome(updated=done.updated, tokens=int(done.global_valid_tokens))

    def abort(self, step_id: str | None = None) -> None:
        self.step.abort(step_id)


class Policy:
    """Forwards each method call to the workers on all ranks, and returns rank 0's result."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            return (await self.ranks.call(method, *args, *([options] if options else ())))[0]

        return call
