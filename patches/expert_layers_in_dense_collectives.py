"""Experts that each rank replicates take part in the tensor parallelism of dense layers.

Symptom:
    With `expert_model_parallel_size=1`, `expert_tensor_parallel_size=1` and tensor parallelism the
    forward raises `First dimension of the tensor should be divisible by tensor parallel size`, or a
    collective fails because sizes differ. Evaluation is also allowed without sequence parallelism:
    then experts silently return TP times their output.

Cause:
    A linear layer leaves communication to the token dispatcher if expert tensor parallelism or
    expert parallelism splits experts over ranks. Otherwise it gathers its input and sums its output
    over tensor-parallel ranks like a dense layer, though each rank has the complete expert.

Affects:
    0.12. What the patch does: an expert's layers do not communicate. From 0.13 on they communicate
    over the ranks that share the expert, which is one rank here.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.13.0/megatron/core/tensor_parallel/layers.py,
    where layers communicate over `tp_group`, the expert group for an expert's layer.

Remove when:
    0.12 is no longer supported.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, a_body_has, bench, target

_ASKED = "self.explicit_expert_comm = self.is_expert and (world_size > 1 or self.expert_parallel)"


def init(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap a parallel linear layer's constructor: an expert's layer then starts no collectives."""
    original(self, *args, **kwargs)
    self.explicit_expert_comm = self.is_expert


def reproduce() -> None:
    """Call an expert's layer of which two tensor-parallel ranks each have a copy (EP 1, ETP 1).
    On stock Megatron the output is twice the right one.
    """
    import torch

    model = bench(tp=2, etp=1, experts=2, distributed_optimizer=False, overlap_grad_reduce=False)
    layer = model.chunks[0].module.decoder.layers[0].mlp.experts.local_experts[0].linear_fc2
    inputs = torch.ones(1, layer.weight.shape[1], device="cuda")
    outputs, _ = layer(inputs)
    right = torch.nn.functional.linear(inputs, layer.weight)
    times = float((outputs * right).sum() / right.square().sum())
    if round(times) != 1:
        raise Fault(f"an expert's output is {round(times)} times the right one")


PATCH = Patch(
    "with EP 1 and ETP 1, experts take part in tensor parallelism of dense layers",
    target("layers.ColumnParallelLinear.__init__", init, _ASKED),
    target("layers.RowParallelLinear.__init__", init, _ASKED),
    before="0.13",
    fixed_when=a_body_has("self.tp_group"),
    loudness="both",
)
