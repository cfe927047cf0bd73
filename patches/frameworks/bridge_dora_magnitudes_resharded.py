"""Bridge's DoRA magnitudes of gate and up are mixed when loaded in another layout, silently.

Symptom:
    If a checkpoint of a gated `linear_fc1` with DoRA is loaded with another number of
    tensor-parallel ranks, rows of gate get the magnitudes of rows of up, and vice versa.

Cause:
    Each rank has rows of gate and rows of up, one part after the other.
    `ParallelLinearDoRAAdapter.sharded_state_dict` describes the magnitudes as if the ranks' parts
    followed each other, though it describes both halves of the factors.

Affects:
    0.2 to main of August 2026. What the patch does: it describes the magnitudes as Megatron
    describes the bias of such a layer. Load a checkpoint that was saved without the patch without
    the patch, in the same layout.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/peft/dora_layers.py,
    `ParallelLinearDoRAAdapter.sharded_state_dict`

Remove when:
    Bridge describes both halves.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import (
    Fault,
    Original,
    Patch,
    arguments,
    gathered,
    shared_folder,
    target,
)

from . import _peft


def describe(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return an adapter's sharded state, with DoRA's magnitudes of gate and up as two entries."""
    call = arguments(original, (self, *args), kwargs)
    state = original(self, *args, **kwargs)
    return _apart(self, state, f"{call['prefix']}weight_magnitude", call["sharded_offsets"])


def _apart(adapter: Any, state: Any, key: str, offsets: tuple[Any, ...]) -> Any:
    # A separate function, because the contract of a wrapper follows only literal names in a result.
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    if adapter.base_linear_name.endswith("linear_fc1") and adapter.config.gated_linear_unit:
        state[key] = apply_swiglu_sharded_factory(state[key], offsets)
    return state


def reproduce() -> None:
    """Save DoRA's magnitudes of a gated layer on two ranks, and load the complete vector.
    Without the patch rows of gate and up are mixed.
    """
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor

    bench = _peft.build("DoRA", {"tp": 2, "sequence_parallel": True})
    adapter = bench.chunks[0].module.decoder.layers[0].mlp.linear_fc1.adapter
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = adapter.sharded_state_dict("", metadata={"dp_cp_group": group})
    folder = shared_folder()
    dist_checkpointing.save({"weight_magnitude": state["weight_magnitude"]}, folder)
    group = parallel_state.get_tensor_model_parallel_group()
    halves = [magnitude.chunk(2) for magnitude in gathered(adapter.weight_magnitude, group)]
    right = torch.cat([part for half in zip(*halves, strict=True) for part in half])
    # Not load_plain_tensors, which raises on stock Megatron with torch 2.15.
    complete = ShardedTensor.from_rank_offsets(
        "weight_magnitude", torch.zeros_like(right), replica_id=group.rank()
    )
    loaded = dist_checkpointing.load({"weight_magnitude": complete}, folder)["weight_magnitude"]
    if not torch.equal(loaded, right):
        raise Fault("the magnitudes of gate and up are mixed in the checkpoint")


PATCH = Patch(
    "Bridge's DoRA magnitudes of gate and up are mixed when loaded in another layout, silently",
    target(
        "peft.dora_layers:ParallelLinearDoRAAdapter.sharded_state_dict",
        describe,
        "sharded_state_dict[magnitude_key] = magnitude_sharded_tensor",
    ),
    since="0.2",
)
