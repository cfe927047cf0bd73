"""Megatron-Bridge's conversion tasks, used for a second weight sync, receive with old types.

Symptom:
    With pipeline stages and expert biases (DeepSeek-V3 and its like) the first weight sync is
    right. From the second sync on, an expert bias is garbage on the stages that do not own it:
    engines route wrongly, and rewards collapse. NCCL reports no error, because each rank passes its
    own number of bytes; gloo ends the process with `op.preamble.length <= op.nbytes`.

Cause:
    A mapping caches the shape and the type of the tensor that it broadcast first. A model in 16
    bits also casts its expert biases, and its routers cast them back to float32 in their first
    forward, after the first sync. From then on the owner sends float32, and the other stages
    receive 16 bits.

Affects:
    Callers that reuse the tasks of `get_conversion_tasks` for several syncs: SkyRL until #1345,
    and, read in August 2026, verl (`_hf_export_tasks`). NeMo-RL reuses them too
    (`refit_conversion_tasks`), but loads a state dict first, after which routers cast the biases
    back. Bridge, read from 0.3.0 to 0.6.0 and on main. What the patch does: each broadcast
    exchanges shapes and types, as the first one does. SkyRL's repair, new tasks for each sync,
    costs the same.

Upstream:
    https://github.com/NovaSky-AI/SkyRL/pull/1345.

Remove when:
    mappings clear their caches when a sync begins.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Fault, Original, Patch, bench, target

_MODULE = "megatron.bridge.models.conversion.param_mapping"


def broadcast(original: Original, self: Any, tensor: Any, cache_key: str | None = None) -> Any:
    """Run Bridge's `broadcast_from_pp_rank`, but first drop the tensor spec cached for `cache_key`.
    The spec is the tensor's shape and type.
    """
    self._tensor_spec_output_cache.pop(cache_key, None)
    return original(self, tensor, cache_key)


def reproduce() -> None:
    """Export the first pipeline stage's expert bias before and after a training step.
    Without the patch the last stage expects a different number of bytes than the first stage sends.
    """
    import torch
    from megatron.core import parallel_state

    from . import _standins

    experts = {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_bias_update_rate": 0.5,
    }
    model = bench(pp=2, dtype="bf16", experts=4, config_overrides=experts)
    module = _standins.import_alone(_MODULE, "modelopt", "transformers")
    mapping = module.ReplicatedMapping("expert_bias", "bias")
    owner = parallel_state.is_pipeline_first_stage()
    biases = [b for n, b in model.chunks[0].named_buffers() if n.endswith("expert_bias")]
    send = torch.distributed.broadcast

    def checked(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sizes: list[Any] = [None, None]
        torch.distributed.all_gather_object(sizes, tensor.nbytes)
        if sizes[0] != sizes[1]:  # gloo would end the process, NCCL reports no error
            raise Fault(f"the first stage sends {sizes[0]} bytes, for {sizes[1]} of the last")
        return send(tensor, *args, **kwargs)

    torch.distributed.broadcast = checked
    for _ in range(2):
        mapping.megatron_to_hf(biases[0] if owner else None, None)
        model.train_step(2, data_seed=0)


PATCH = Patch(
    "Megatron-Bridge's conversion tasks, used for a second sync, receive with old types",
    target(
        "bridge.models.conversion.param_mapping:MegatronParamMapping.broadcast_from_pp_rank",
        broadcast,
        "tensor_spec_output = self._tensor_spec_output_cache[cache_key]",
    ),
    since="0.3",
    ranks=2,
    loudness="both",
)
