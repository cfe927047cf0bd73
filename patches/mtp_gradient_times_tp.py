"""Under tensor parallelism an MTP layer's gradient is as many times too large as there are ranks.

Symptom:
    With multi-token prediction (MTP) and tensor parallelism, all that is in front of an MTP layer
    is trained on TP times the MTP loss: its projection and norms, the embedding and the decoder.
    With TP 2 the whole gradient of a small model is off by 41 % of its norm. No error, and the
    logged losses are right.

Cause:
    The layer gathers the output of its projection over tensor-parallel ranks with a function whose
    backward adds up the ranks' gradients. They all have the same one, because what follows is
    computed on each rank, or gathered from all with sequence parallelism.

Affects:
    0.12. What the patch does: the layer gathers with the function that 0.13 takes, whose backward
    gives each rank its part of the gradient.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.13.0/megatron/core/transformer/multi_token_prediction.py,
    `MultiTokenPredictionLayer.forward` takes `gather_from_tensor_model_parallel_region`.

Remove when:
    0.12 is no longer supported.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, no_body_has, target

_GATHER = "all_gather_last_dim_from_tensor_parallel_region"
_CALL = f"hidden_states = {_GATHER}(hidden_states)"


def forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the layer with a gather whose backward gives each rank its part, and adds none up.

    Takes part: all tensor-parallel ranks.
    """
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from megatron.core.transformer import multi_token_prediction as module

    theirs = getattr(module, _GATHER)
    setattr(module, _GATHER, gather_from_tensor_model_parallel_region)
    try:
        return original(self, *args, **kwargs)
    finally:
        setattr(module, _GATHER, theirs)


def reproduce() -> None:
    """Compare an MTP layer's gradient along itself to the difference that its output makes."""
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
    # A central difference in float32: far nearer to the derivative than to any multiple of it.
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
