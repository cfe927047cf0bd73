"""Bridge's separate adapters of grouped experts are not trained if ranks share experts, silently.

Symptom:
    With `share_expert_adapters=False` and `expert_tensor_parallel_size` above 1 the first factor on
    `linear_fc1` and both factors on `linear_fc2` get no gradient, and adapters on `linear_fc2` add
    a wrong product.

Cause:
    `_gather_along_last_dim` gathers with `torch.distributed.all_gather`, through which no gradient
    flows. The bottleneck of `linear_fc2` is not summed over the ranks that share its input.

Affects:
    0.5 on, up to main of August 2026. What the patch does: it gathers with Megatron's function,
    sums the bottleneck and its gradient over the ranks, and adds only the rank's own rows to an
    output that the dispatcher sums, as `bridge-expert-adapter-unsummed` does.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5634

Remove when:
    Bridge gathers with a gradient, and sums the bottleneck.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_idempotent.patches._case import Original, Patch, no_body_has, target

from . import _peft


def build(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Build an adapter of grouped experts, with the pre-hook `_sum` between its factors.
    The hook sums over the ranks that share the experts.
    """
    original(self, *args, **kwargs)
    if self.expert_tp_group is not None and self.expert_tp_group.size() > 1:
        self.activation.register_forward_pre_hook(
            functools.partial(_sum, self.expert_tp_group, self.input_is_parallel)
        )


def _sum(group: Any, summed: bool, _activation: Any, inputs: tuple[Any]) -> Any:
    """Pre-hook of an adapter's activation: in the backward, sum its input's gradient over `group`.
    With `summed`, also sum the input itself in the forward. The input is the tensor between the
    adapter's factors.
    """
    from megatron.core.tensor_parallel import mappings

    (tensor,) = inputs
    if summed:
        tensor = mappings.reduce_from_tensor_model_parallel_region(tensor, group=group)
    return mappings.copy_to_tensor_model_parallel_region(tensor, group=group)


def gather(original: Original, self: Any, tensor: Any) -> Any:
    """Gather the tensor between an adapter's factors over ranks, so that gradients flow back.
    If the adapter's output is summed over ranks later, pad the tensor with zeros instead.
    """
    from megatron.core.tensor_parallel import mappings

    group = self.expert_tp_group
    if group is None or group.size() == 1:
        return tensor
    if self.input_is_parallel:
        return _peft.among_zeros(tensor, group)
    return mappings.gather_from_tensor_model_parallel_region(tensor, group=group)


def reproduce() -> None:
    """Compare adapters of grouped experts that two ranks share with the product of their factors.
    Without the patch some factors get no gradient.
    """
    bench = _peft.build(
        "LoRA",
        {"tp": 2, "sequence_parallel": True, "experts": 2},
        grouped=True,
        share_expert_adapters=False,
    )
    _peft.expect_products(bench.chunks)


PATCH = Patch(
    "Bridge's adapters of grouped experts that ranks share are not trained, silently",
    target(
        "peft.utils:GroupedExpertLinearAdapter.__init__",
        build,
        "ParallelLinearAdapter._get_activation_fn(self, activation)",
    ),
    target(
        "peft.utils:GroupedExpertLinearAdapter._gather_along_last_dim",
        gather,
        "torch.distributed.all_gather",
    ),
    since="0.5",
    fixed_when=no_body_has("torch.distributed.all_gather"),
)
