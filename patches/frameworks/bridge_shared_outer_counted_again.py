"""Bridge's shared outer LoRA factor gets its gradient once for each replica, silently.

Symptom:
    With `experts_shared_outer_loras` the gradient of the shared factor is too large by the number
    of expert-data-parallel ranks; the other factor's is right. The gradient norm, clipping and
    every optimizer that is not invariant to scale are wrong. With `gradient_accumulation_fusion`
    the ranks' copies drift apart as well.

Cause:
    `_make_cross_ep_replicated` sums the gradient in a hook over all ranks of the pipeline stage,
    and DDP then sums it over the expert-data-parallel ranks again. With the fused kernel the hook
    gets a dummy, see `bridge-shared-adapter-drifts`. It also synchronises weights on CUDA only.

Affects:
    0.5 on, up to main of August 2026. What the patch does: the hook sums over expert-parallel
    ranks, because DDP does not; the weight starts with the values of the first expert-parallel
    rank; and the shared layer computes its gradient without the fused kernel.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/6009,
    https://github.com/radixark/miles/pull/2723

Remove when:
    Bridge sums the shared factor over expert-parallel ranks alone, and not in a hook.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Original, Patch, no_body_has, target

from . import _peft


def build(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Build an adapter with a factor that all experts share; turn off fused gradient accumulation.
    The factor's gradient then passes through its hook.
    """
    original(self, *args, **kwargs)
    _peft.unfuse(self.linear_in, self.linear_out)


def replicate(original: Original, weight: Any) -> None:
    """Broadcast a factor that all experts share from the first expert-parallel rank to the others.
    Register a hook that sums the factor's gradient over these ranks.
    """
    import torch
    from megatron.core import parallel_state

    group = parallel_state.get_expert_model_parallel_group()
    if torch.distributed.get_world_size(group) <= 1:
        return
    first = torch.distributed.get_global_rank(group, 0)
    device = torch.device("cuda" if torch.distributed.get_backend(group) == "nccl" else "cpu")
    value = weight.data.to(device)
    torch.distributed.broadcast(value, src=first, group=group)
    weight.data.copy_(value)
    weight.register_hook(_summed)


def _summed(gradient: Any) -> Any:
    import torch
    from megatron.core import parallel_state

    gradient = gradient.contiguous()
    torch.distributed.all_reduce(gradient, group=parallel_state.get_expert_model_parallel_group())
    return gradient


def reproduce() -> None:
    """Check gradients of adapters in which all experts share one factor, on two replicas.
    Without the patch the gradient of the shared factor is twice the right one.

    The loss depends on the product of both factors alone, so that each factor times its gradient
    has the same sum.
    """
    bench = _peft.build("LoRA", {"experts": 4}, grouped=True, experts_shared_outer_loras=True)
    bench.forward_backward(2, data_seed=0)
    _peft.expect_balance(bench.chunks)


PATCH = Patch(
    "Bridge's shared outer LoRA factor gets its gradient once for each replica, silently",
    target(
        "peft.utils:SharedOuterGroupedExpertAdapter.__init__",
        build,
        "_make_cross_ep_replicated(shared_weight)",
    ),
    target(
        "peft.utils:_make_cross_ep_replicated", replicate, "weight.register_hook(_all_reduce_grad)"
    ),
    since="0.5",
    fixed_when=no_body_has(
        "parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)"
    ),
)
