"""Under tensor parallelism an MTP layer's gradient is too large by a factor of the number of ranks.

Symptom:
    With multi-token prediction (MTP) and tensor parallelism, everything before an MTP layer's
    transformer block is trained on TP times the MTP loss: its projection and norms, the embedding
    and the decoder. With TP 2 the gradient of a small model is off by 41 % of its norm. No error,
    and the logged losses are right.

Cause:
    The layer gathers the output of its projection over tensor-parallel ranks with a function whose
    backward sums the ranks' gradients. All ranks have the same gradient, because each rank computes
    the layers that follow, or gathers their gradient from all ranks with sequence parallelism.

Affects:
    0.12. What the patch does: the layer gathers with the function that 0.13 uses, whose backward
    gives each rank its part of the gradient.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.13.0/megatron/core/transformer/multi_token_prediction.py,
    `MultiTokenPredictionLayer.forward` uses `gather_from_tensor_model_parallel_region`.

Remove when:
    0.12 is no longer supported.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, no_body_has, target

_GATHER = "all_gather_last_dim_from_tensor_parallel_region"
_CALL = f"hidden_states = {_GATHER}(hidden_states)"


def forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an MTP layer with a gather whose backward gives each rank its part of the gradient.
    The backward of upstream's gather sums the ranks' gradients. A collective over tensor-parallel
    ranks.
    """
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from megatron.core.transformer import multi_token_prediction as module

    upstream_gather = getattr(module, _GATHER)
    setattr(module, _GATHER, gather_from_tensor_model_parallel_region)
    try:
        return original(self, *args, **kwargs)
    finally:
        setattr(module, _GATHER, upstream_gather)


def reproduce() -> None:
    """Compare an MTP layer's gradient with finite differences, on two tensor-parallel ranks.
    On stock Megatron the gradient is twice the right one.
    """
    import torch

    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(tp=2, overlap_grad_reduce=False, mtp=1)
    (layer,) = model.chunks[0].module.mtp.layers
    shape = tiny.SEQUENCE, tiny.BATCH, model.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    embedded, hidden, weights = (
        torch.randn(shape, generator=generator).cuda() for _ in ("embedded", "hidden", "weights")
    )
    *_, masked = tiny.inputs(0)

    def loss(hidden: Any) -> Any:
        return (layer(embedded, hidden, masked) * weights).sum()

    (gradient,) = torch.autograd.grad(loss(hidden.requires_grad_()), hidden)
    # A central difference in float32 is far closer to the derivative than to twice that.
    step = 1e-2 / float(gradient.norm())
    with torch.no_grad():
        ahead, back = (float(loss(hidden + sign * step * gradient)) for sign in (1, -1))
    times = float(gradient.square().sum()) * 2 * step / (ahead - back)
    if round(times) != 1:
        raise Fault(f"an MTP layer's gradient is {round(times)} times the right one")


PATCH = Patch(
    "an MTP layer's gradient is TP times the right one under tensor parallelism",
    target("mtp.MultiTokenPredictionLayer.forward", forward, _CALL),
    before="0.13",
    fixed_when=no_body_has(_CALL),
)
