"""Bridge's adapters drop the same positions in each tensor-parallel rank's features, silently.

Symptom:
    With `dropout` above 0 and tensor parallelism without sequence parallelism, features whose
    numbers differ by the number of a rank's features are dropped together, so there are fewer
    independent masks than on one rank. With `dropout_position="post"` this concerns the outputs of
    `linear_qkv` and `linear_fc1`. Ranks that share experts also have the same masks, if
    `expert_tensor_parallel_size` is above the tensor-parallel size.

Cause:
    The generator outside Megatron's tracker has the same state on all ranks that share a layer,
    which is right for replicated features. `ParallelLinearAdapter` also draws from it for features
    that only this rank has. With sequence parallelism Megatron runs all layers in its tracker's
    state, which differs between tensor-parallel ranks.

Affects:
    0.2 to main of August 2026. What the patch does: masks of the rank's own features are drawn in
    the state of Megatron's tracker, like the masks of Megatron's attention; masks of experts in the
    tracker's expert-parallel state. Separate adapters per grouped expert
    (`share_expert_adapters=False`) keep upstream's masks.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/peft/utils.py,
    `ParallelLinearAdapter.forward`

Remove when:
    Bridge draws these masks in the tracker's state.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Fault, Original, Patch, gathered, target

from . import _peft


def compute(original: Original, self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an adapter; if ranks split the features it drops, draw from this rank's random state.
    Ranks that all hold the same features draw equal dropout.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel import random

    ranks = dense = ps.get_tensor_model_parallel_world_size()
    state = []
    if getattr(self, "is_expert", False):
        ranks = ps.get_expert_tensor_parallel_world_size()
        state.append(random.get_expert_parallel_rng_tracker_name())
    first = self.dropout_position == "pre"
    splits_features = ranks > 1 and self.input_is_parallel == first and _peft.is_cut(self)
    # With sequence parallelism all of a layer runs in the state of the tensor-parallel rank.
    if not (splits_features and _peft.drops(self)) or (
        self.config.sequence_parallel and ranks <= dense
    ):
        return original(self, x, *args, **kwargs)
    with random.get_cuda_rng_tracker().fork(*state):
        return original(self, x, *args, **kwargs)


def reproduce() -> None:
    """Compare two ranks' dropout masks, which must be equal for replicated features only.
    Without the patch they are equal for split features, too.
    """
    import torch
    from megatron.core import parallel_state as ps

    for position, split_layer in (("pre", "linear_proj"), ("post", "linear_qkv")):
        bench = _peft.build("LoRA", {"tp": 2}, dropout=0.5, dropout_position=position)
        attention = bench.chunks[0].module.decoder.layers[0].self_attention
        for name in ("linear_qkv", "linear_proj"):
            adapter = getattr(attention, name).adapter
            adapter.dropout.register_forward_hook(lambda drop, _, y: setattr(drop, "drawn", y == 0))
            adapter(torch.ones(4, 2, adapter.linear_in.weight.shape[1]))
            drawn, group = adapter.dropout.drawn.int(), ps.get_tensor_model_parallel_group()
            masks = gathered(drawn, group)
            if masks[0].equal(masks[1]) == (name == split_layer):
                raise Fault(f"ranks have the wrong masks of {name}, {position}")


PATCH = Patch(
    "Bridge's adapters drop the same of each tensor-parallel rank's features, silently",
    target("peft.utils:ParallelLinearAdapter.forward", compute, "x = self.dropout(x)"),
    since="0.2",
)
