"""Bridge's adapters drop the same places of each tensor-parallel rank's features, silently.

Symptom:
    With `dropout` above 0 and tensor parallelism without sequence parallelism, features whose
    numbers differ by a rank's share are dropped together, so there are fewer independent masks than
    on one rank. With `dropout_position="post"` it is the outputs of `linear_qkv` and `linear_fc1`.
    So do ranks that share experts, where `expert_tensor_parallel_size` is above the tensor-parallel
    size.

Cause:
    The generator outside Megatron's tracker has the same state on all ranks that share a layer,
    which is right for what all of them have. `ParallelLinearAdapter` draws from it for the rank's
    own features, too. With sequence parallelism Megatron runs all layers in its tracker's state,
    which tensor-parallel ranks have each of their own.

Affects:
    0.2 to main of August 2026. What the patch does: masks of the rank's own features are drawn in
    the state of Megatron's tracker, as those of its own attention are; those of experts in its
    expert-parallel one. Adapters of one per grouped expert (`share_expert_adapters=False`) keep
    upstream's masks.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/peft/utils.py,
    `ParallelLinearAdapter.forward`

Remove when:
    Bridge draws by the tracker.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Fault, Original, Patch, gathered, target

from . import _peft


def compute(original: Original, self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the adapter; draw the mask of the rank's own features in the tracker's state."""
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel import random

    ranks = dense = ps.get_tensor_model_parallel_world_size()
    state = []
    if getattr(self, "is_expert", False):
        ranks = ps.get_expert_tensor_parallel_world_size()
        state.append(random.get_expert_parallel_rng_tracker_name())
    first = self.dropout_position == "pre"
    own = ranks > 1 and self.input_is_parallel == first and _peft.is_cut(self)
    # With sequence parallelism all of a layer is in the state of the tensor-parallel rank.
    if not (own and _peft.drops(self)) or (self.config.sequence_parallel and ranks <= dense):
        return original(self, x, *args, **kwargs)
    with random.get_cuda_rng_tracker().fork(*state):
        return original(self, x, *args, **kwargs)


def reproduce() -> None:
    """Look at the masks of two ranks: equal for what both have, different for their own parts."""
    import torch
    from megatron.core import parallel_state as ps

    for position, other in (("pre", "linear_proj"), ("post", "linear_qkv")):
        bench = _peft.build("LoRA", {"tp": 2}, dropout=0.5, dropout_position=position)
        attention = bench.chunks[0].module.decoder.layers[0].self_attention
        for name in ("linear_qkv", "linear_proj"):
            adapter = getattr(attention, name).adapter
            adapter.dropout.register_forward_hook(lambda own, _, y: setattr(own, "drawn", y == 0))
            adapter(torch.ones(4, 2, adapter.linear_in.weight.shape[1]))
            drawn, group = adapter.dropout.drawn.int(), ps.get_tensor_model_parallel_group()
            found = gathered(drawn, group)
            if found[0].equal(found[1]) == (name == other):
                raise Fault(f"ranks have the wrong masks of {name}, {position}")


PATCH = Patch(
    "Bridge's adapters drop the same of each tensor-parallel rank's features, silently",
    target("peft.utils:ParallelLinearAdapter.forward", compute, "x = self.dropout(x)"),
    since="0.2",
)
