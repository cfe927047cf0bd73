"""Experts that each rank has whole take part in the tensor parallelism of dense layers.

Symptom:
    With `expert_model_parallel_size=1`, `expert_tensor_parallel_size=1` and tensor parallelism the
    forward raises `First dimension of the tensor should be divisible by tensor parallel size`, or
    ends in a collective of other sizes. Megatron evaluates experts without sequence parallelism,
    too: they give TP times their output then, silently.

Cause:
    A linear layer leaves communication to the token dispatcher if experts are split over ranks, by
    tensors or by experts. Otherwise it gathers its input and adds up its output over
    tensor-parallel ranks, as a dense layer does, though each rank has the whole expert.

Affects:
    0.12. What the patch does: an expert's layers do not communicate. From 0.13 on they communicate
    over the ranks of an expert, and here that is one.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.13.0/megatron/core/tensor_parallel/layers.py,
    where layers communicate over `tp_group`, which is of experts for a layer of an expert.

Remove when:
    0.12 is no longer supported.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, a_body_has, bench, target

_ASKED = "self.explicit_expert_comm = self.is_expert and (world_size > 1 or self.expert_parallel)"


def init(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Build a linear layer that leaves all communication to others if it is an expert's."""
    original(self, *args, **kwargs)
    self.explicit_expert_comm = self.is_expert


def reproduce() -> None:
    """Call an expert's layer, which each of two tensor-parallel ranks has whole."""
    import torch

    model = bench(tp=2, etp=1, experts=2, distributed_optimizer=False, overlap_grad_reduce=False)
    layer = model.chunks[0].module.decoder.layers[0].mlp.experts.local_experts[0].linear_fc2
    given = torch.ones(1, layer.weight.shape[1], device="cuda")
    found, _ = layer(given)
    right = torch.nn.functional.linear(given, layer.weight)
    times = float((found * right).sum() / right.square().sum())
    if round(times) != 1:
        raise Fault(f"an expert's output is {round(times)} times the right one")


PATCH = Patch(
    "with EP 1 and ETP 1, experts take part in tensor parallelism of dense layers",
    target("layers.ColumnParallelLinear.__init__", init, _ASKED),
    target("layers.RowParallelLinear.__init__", init, _ASKED),
    before="0.13",
    fixed_when=a_body_has("self.tp_group"),
)
