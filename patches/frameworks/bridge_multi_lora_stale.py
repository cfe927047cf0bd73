"""Bridge's layers of several adapters compute with weights from before the step, silently.

Symptom:
    With the distributed optimizer and `overlap_param_gather`, `MultiLoRA` trains on stale weights:
    in each forward a replica has new values of its own part of the last step, and old values of all
    other parts. Losses differ from the second step on.

Cause:
    DDP waits for a gather in a hook before the forward of the module that holds the weights.
    `MultiLoRALinear` and `MultiLoRAGroupedExpertLinear` multiply by all adapters' weights at once,
    without calling these modules. No other hook waits for the gather, because the base is frozen,
    and not in a buffer.

Affects:
    Main of August 2026, 0.7. What the patch does: it runs the hooks of the adapters' modules before
    the layer's forward.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/peft/multi_lora_layers.py

Remove when:
    Bridge calls the modules whose weights it uses, or their hooks.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Original, Patch, expect_agreement, target

from . import _peft

_STACKED = "stacked_A = torch.stack([a.linear_in.weight for a in self.adapters])"


def compute(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a layer with several adapters, but first wait for the gathers of their weights."""
    for module in self.adapters.modules():
        for hook in module._forward_pre_hooks.values():
            hook(module, ())
    return original(self, *args, **kwargs)


def reproduce() -> None:
    """Take a step with overlap_param_gather on two replicas, run a forward, and compare weights.
    Without the patch the replicas have different weights.
    """
    layout = {"with_optimizer": True, "distributed_optimizer": True, "overlap_param_gather": True}
    bench = _peft.build("MultiLoRA", layout, n_adapters=2, dim=8)
    bench.train_step(1, data_seed=0)
    bench.forward_backward(1, data_seed=0, forward_only=True)
    expect_agreement(bench, "in a forward after the step")


PATCH = Patch(
    "Bridge's layers of several adapters compute with weights of before the step, silently",
    *(
        target(f"peft.multi_lora_layers:{layer}.forward", compute, _STACKED)
        for layer in ("MultiLoRALinear", "MultiLoRAGroupedExpertLinear")
    ),
    since="0.7",
)
