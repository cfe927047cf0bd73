"""Rotary embeddings computed under inference mode are returned to training.

Symptom:
    `RuntimeError: Inference tensors cannot be saved for backward. To work around you can make a
    clone to get a normal tensor and use it in autograd.` in a training forward that saves the
    rotary table (fused RoPE does), if log-probabilities or generation under
    `torch.inference_mode()` used the same sequence length before.

Cause:
    `RotaryEmbedding.forward` is cached by length, and inference mode is not part of the key.

Affects:
    Every release. What the patch does: if inference calls it first, the table is computed outside
    of inference mode, without gradients. A cached table is returned as before.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/models/common/embeddings/rotary_pos_embedding.py;
    `megatron/rl/rl_utils.py` there calls `rotary_module.forward.cache_clear()` around generation.
    https://github.com/Dao-AILab/flash-attention/pull/299 repairs the same in its own rotary table.

Remove when:
    cached tables are never inference tensors. `upstream/rope-table-from-inference` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Original, Patch, address, target


def table(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Compute a rotary table as an ordinary tensor, even under inference mode."""
    import torch

    if not torch.is_inference_mode_enabled():
        return original(*args, **kwargs)
    with torch.inference_mode(False), torch.no_grad():
        return original(*args, **kwargs)


def reproduce() -> None:
    """Compute a rotary table under inference mode, then use it in a backward.
    On stock Megatron the cached table cannot be saved for backward.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    parallel_state.initialize_model_parallel()
    embedding = RotaryEmbedding(kv_channels=16, rotary_percent=1.0)
    with torch.inference_mode():
        embedding(32)
    query = torch.ones(32, 1, 1, 16, device="cuda", requires_grad=True)
    (query * embedding(32)).sum().backward()


PATCH = Patch(
    "rotary tables cached under inference mode cannot be saved for a backward",
    target("core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.forward", table),
    target(
        "core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding.forward", table
    ),
    groups=("generation",),
    fixed_by=(
        (
            address("core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.forward"),
            "torch.inference_mode(False)",
        ),
    ),
    ranks=1,
    stock_error=r"RuntimeError: Inference tensors cannot be saved for backward",
)
