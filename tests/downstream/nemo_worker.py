"""NeMo-RL's policy worker on a rank, with its own data, packer, forward pass and losses.

Legend: B rows, T positions.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from adapters import import_from
from megatron_idempotent.patches.frameworks import _nemo_rl, _standins

from megatron_idempotent.proof.cpu import tiny

ROWS, VALID = 8, 16
#: Tokens of a pack, which is two of the rows, and the fewest of a row. So there are four packs, or
#: two, and a division by their number changes no bits.
BUDGET, LEAST = 64, 22
_REAL = (
    "algorithms.logits_sampling_utils",
    "distributed.collectives",
    "data.packing.metrics",
    "data.packing.algorithms",
    "data.packing",
    "distributed.batched_data_dict",
    "distributed.model_utils",
    "algorithms.utils",
    "algorithms.loss.interfaces",
    "algorithms.loss.loss_functions",
    "algorithms.loss.utils",
    "algorithms.loss.wrapper",
    "algorithms.loss",
    "models.megatron.common",
    "models.megatron.data",
    "models.megatron.pipeline_parallel",
)


def import_nemo_rl(source: str) -> None:
    """Import what NeMo-RL's workers compute with from a checkout."""
    import_from(source, "nemo_rl", _REAL, "megatron.bridge", "hydra", "zmq")
    _nemo_rl.import_worker("policy")


class NemoWorker(_nemo_rl.NemoRL):
    """The worker around a small model; `adapter` is a class whose methods go before its own.

    Example: `NemoWorker().step(seed=0, chunks=(2, 6))`
    """

    def __init__(self, adapter: type | None = None, *, packed: bool = False, **layout: Any) -> None:
        from megatron.core import parallel_state

        per_token = {"calculate_per_token_loss": True}
        if packed:
            # No position ids come with a pack.
            rope = {"position_embedding_type": "rope"}
            layout = {"exact_attention": True, "model_overrides": rope, **layout}
        super().__init__(**{"overlap_param_gather": True, "config_overrides": per_token, **layout})
        self.packed = packed
        for name, value in vars(adapter).items() if adapter else ():
            if not name.startswith("__"):
                setattr(type(self.worker), name, value)
        self.worker.dtype = self.bench.config.params_dtype
        cfg, size = self.worker.cfg, parallel_state.get_data_parallel_world_size()
        self.worker.dp_size = size
        self.replica = parallel_state.get_data_parallel_rank()
        cfg["train_global_batch_size"] = ROWS * size
        cfg["train_micro_batch_size"] = tiny.BATCH
        cfg["dynamic_batching"] = {"enabled": False}
        cfg["sequence_packing"] = {"enabled": packed}
        cfg["make_sequence_length_divisible_by"] = self.multiple = 2 * layout.get("cp", 1)
        for name in ("tensor", "pipeline", "context"):
            key = f"{name}_parallel_size" if name == "context" else f"{name}_model_parallel_size"
            cfg["megatron_cfg"][key] = getattr(self.bench.config, key)
        cfg["megatron_cfg"]["sequence_parallel"] = False

    def _stand_in(self) -> None:
        train = _standins.import_alone("nemo_rl.models.megatron.train")
        train.get_capture_context = lambda *_: (contextlib.nullcontext(), None)
        for name in ("logical_and", "reduce_max_stat"):
            setattr(self.module, f"{name}_across_model_parallel_group", lambda value, **_: value)
        stages = sys.modules["nemo_rl.models.megatron.pipeline_parallel"]
        self.module.broadcast_loss_metrics_from_last_stage = (
            stages.broadcast_loss_metrics_from_last_stage
        )
        self.module.get_moe_metrics = lambda **_: {}
        self.module.attach_media_token_validity_mask = lambda *_: None

    def loss_fn(self, **config: Any) -> Any:
        """NeMo-RL's own policy gradient loss."""
        from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

        return ClippedPGLossFn(ClippedPGLossConfig(**config))

    def data(self, seed: int, *, valid: bool = True) -> Any:
        """Rows of this replica: half of them count, with 16 tokens each, for exact sums."""
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        draw = torch.Generator().manual_seed(1000 * seed + self.replica)
        shape = ROWS, tiny.SEQUENCE
        lengths_B = torch.full((ROWS,), tiny.SEQUENCE)
        if self.packed:
            lengths_B = torch.randint(LEAST, tiny.SEQUENCE + 1, (ROWS,), generator=draw)
        token_mask_BT = torch.zeros(shape)
        for row, length in zip(token_mask_BT, lengths_B.tolist(), strict=True):
            row[1 + torch.randperm(length - 1, generator=draw)[:VALID]] = 1
        logprobs_BT = -4 - torch.rand(shape, generator=draw)
        return BatchedDataDict(
            {
                "input_ids": torch.randint(0, tiny.VOCABULARY, shape, generator=draw),
                "input_lengths": lengths_B,
                "token_mask": token_mask_BT,
                "sample_mask": (torch.arange(ROWS) % 2).float() * valid,
                "advantages": torch.randn(shape, generator=draw),
                "prev_logprobs": logprobs_BT,
                "generation_logprobs": logprobs_BT + 0.1 * torch.rand(shape, generator=draw),
                "reference_policy_logprobs": logprobs_BT - 0.1 * torch.rand(shape, generator=draw),
            }
        )

    def step(
        self,
        seed: int,
        chunks: tuple[int, ...] = (ROWS,),
        *,
        loss_fn: Any = None,
        valid: bool = True,
    ) -> dict[str, Any]:
        """One split step, of so many rows in each chunk; all replicas have as many chunks."""
        data, start = self.data(seed, valid=valid), 0
        self.worker.begin_train_step(self.loss_fn() if loss_fn is None else loss_fn)
        for rows in chunks:
            self.worker.train_microbatch(self.packs(data.slice(start, start + rows)))
            start += rows
        found: dict[str, Any] = self.worker.finish_train_step()
        return found

    def packs(self, data: Any) -> Any:
        """The rows in the order in which NeMo-RL packs them, with its bins."""
        if not self.packed:
            return data
        (packed,), _ = data.shard_by_batch_size(
            1,
            sequence_packing_args={
                "algorithm": "modified_first_fit_decreasing",
                "max_tokens_per_microbatch": BUDGET,
                "input_key": "input_ids",
                "input_lengths_key": "input_lengths",
                "sequence_length_pad_multiple": self.multiple,
            },
        )
        return packed

    def parameters(self) -> bytes:
        return self.outcome()[1]
