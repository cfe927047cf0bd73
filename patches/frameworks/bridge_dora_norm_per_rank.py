"""Bridge's DoRA scales row-parallel layers by a part of the weight's norm, silently.

Symptom:
    Under tensor parallelism the outputs of `linear_proj` and `linear_fc2` with DoRA differ between
    ranks from the first step on, and are wrong on all of them; so are all gradients before these
    layers. Under sequence parallelism the magnitudes of these layers drift apart. In other layers
    the gradient norm counts the magnitudes of one rank only.

Cause:
    `DoRALinear._get_weight_norm` takes the norm of the rank's own columns, while the output that it
    scales is summed over ranks. The magnitude of such a layer is the same on all ranks, but with
    sequence parallelism each rank sees a part of the positions, and the magnitude lacks the mark
    `sequence_parallel`, by which Megatron sums gradients. The magnitude of a column-parallel layer
    is split, and lacks the mark `tensor_model_parallel`, by which Megatron's norm counts it.

Affects:
    0.2 to main of August 2026. What the patch does: squares are summed over the ranks that share
    the rows, and the marks are set. A checkpoint from a run without the patch has magnitudes of one
    rank: train the adapters of `linear_proj` and `linear_fc2` from scratch.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/peft/dora_layers.py

Remove when:
    Bridge's norm is that of complete rows, and magnitudes are marked.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Original, Patch, no_body_has, target

from megatron_idempotent.megatron.optimizers import mark_part

from . import _peft


def norm(original: Original, self: Any) -> Any:
    """Return the row norms [outputs] of a DoRA layer's merged weight, over complete rows.
    If ranks hold parts of the rows, sum the squares over ranks. All tensor-parallel ranks take
    part.
    """
    import torch
    from megatron.core import parallel_state

    local = original(self)
    group = parallel_state.get_tensor_model_parallel_group()
    if not self.adapter.input_is_parallel or torch.distributed.get_world_size(group) == 1:
        return local
    squares = local.to(torch.promote_types(local.dtype, torch.float32)).square()
    torch.distributed.all_reduce(squares, group=group)
    return squares.sqrt().to(local.dtype)


def begin(original: Original, self: Any, value: Any) -> None:
    """Create DoRA's magnitude parameter, and mark it as a shard or as replicated."""
    original(self, value)
    if self.input_is_parallel:
        self.weight_magnitude.sequence_parallel = not self.disable_sequence_parallel_comm
    elif _peft.is_cut(self):
        mark_part(self.weight_magnitude, 0)


def reproduce() -> None:
    """Check DoRA's row norms, and gradients of replicated parameters, on two tensor-parallel ranks.
    Without the patch a rank has the norms of its own part of the rows.
    """
    bench = _peft.build("DoRA", {"tp": 2, "sequence_parallel": True})
    _peft.expect_norms(bench.chunks)
    bench.forward_backward(1, data_seed=0)
    _peft.expect_replicas(bench.chunks)


PATCH = Patch(
    "Bridge's DoRA scales row-parallel layers by a part of the weight's norm, silently",
    target(
        "peft.dora_layers:DoRALinear._get_weight_norm", norm, "torch.linalg.norm(weight, dim=1)"
    ),
    target(
        "peft.dora_layers:ParallelLinearDoRAAdapter.init_weight_magnitude",
        begin,
        "self.weight_magnitude = nn.Parameter(value, requires_grad=True)",
    ),
    since="0.2",
    fixed_when=no_body_has("torch.linalg.norm(weight, dim=1).to(weight.dtype).detach()"),
)
