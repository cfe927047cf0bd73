"""Bridge's adapter of a router mixes the tokens of sequence-parallel ranks, silently.

Symptom:
    With sequence parallelism the adapter of a router, or of another layer with a replicated weight,
    adds values of other tokens to a token's output.

Cause:
    Such a layer gets only the rank's own positions. But the adapter's factors are split over the
    ranks, and each rank gathers the bottlenecks of the others, which are of other positions: for
    these layers `ParallelLinearAdapter` skips the gather of positions before and the scatter after.

Affects:
    0.2 on, up to main of August 2026. What the patch does: it gathers the positions before such an
    adapter, and scatters its output.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/peft/utils.py,
    `ParallelLinearAdapter.forward`. https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5156
    repairs it for multi-LoRA.

Remove when:
    Bridge gathers positions for layers that are not split, or does not split their factors.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Fault, Original, Patch, gathered, target

from . import _peft


def compute(original: Original, self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an adapter; if its layer is replicated, run it over the gathered sequence of all ranks.
    Then return this rank's part of the output.
    """
    if _peft.is_cut(self) or not self.config.sequence_parallel:
        return original(self, x, *args, **kwargs)
    from megatron.core.tensor_parallel import mappings

    all_positions = mappings.gather_from_sequence_parallel_region(x)
    output = original(self, all_positions, *args, **kwargs)
    return mappings.scatter_to_sequence_parallel_region(output)


def reproduce() -> None:
    """Compare a router's adapter on each rank's own tokens with the product of its factors.
    Without the patch the adapter's output mixes in tokens of other ranks.
    """
    import torch
    from megatron.core import parallel_state

    bench = _peft.build(
        "LoRA",
        {"tp": 2, "sequence_parallel": True, "experts": 4, "etp": 1},
        target_modules=["router"],
    )
    group = parallel_state.get_tensor_model_parallel_group()
    adapter = bench.chunks[0].module.decoder.layers[0].mlp.router.adapter
    inner, outer = (
        torch.cat(gathered(layer.weight, group))
        for layer in (adapter.linear_in, adapter.linear_out)
    )
    generator = torch.Generator().manual_seed(group.rank())
    x = torch.randn(4, 2, inner.shape[1], generator=generator)
    if not torch.allclose(adapter(x), adapter.alpha / adapter.dim * x @ inner.T @ outer.T):
        raise Fault("a router's adapter mixes in tokens of other ranks")


PATCH = Patch(
    "Bridge's adapter of a router mixes tokens of sequence-parallel ranks, silently",
    target(
        "peft.utils:ParallelLinearAdapter.forward",
        compute,
        "self.linear_in(x)",
        "self.linear_out(x)",
    ),
    since="0.2",
)
