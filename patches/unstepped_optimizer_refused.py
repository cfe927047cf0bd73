"""A checkpoint cannot be loaded into a distributed optimizer that never stepped.

Symptom:
    A bare `AssertionError` from `optimizer.state_dict()`, in `assert len(steps) == 1`, and so from
    saving a run before its first step, and from loading at the start of a run, which is when runs
    load: `sharded_state_dict` begins with `state_dict = self.state_dict()`. Without Transformer
    Engine and Apex only.

Cause:
    `state_dict` reads the one step counter of torch's Adam from the state of its parameters, and
    before the first step there is none.

Affects:
    Every release, with torch's Adam or AdamW as the fallback. What the patch does: an optimizer
    without any state gets the state that its first step would create: zeros, at step 0.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/distrib_optimizer.py,
    `state_dict`. https://github.com/vllm-project/vime/pull/427 reports it: "Fix native Adam
    checkpoint resume".

Remove when:
    `state_dict` accepts an optimizer without state. `upstream/unstepped-optimizer-refused` has the
    repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import optimizers

from ._case import Fault, Original, Patch, address, bench, target


def state_dict(original: Original, self: Any) -> Any:
    """Wrap `state_dict`: before torch's Adam has stepped, first fill its state with zeros."""
    if not self.optimizer.state and optimizers.is_torch_adam(self):
        for adam in optimizers.stepping(self.optimizer):
            _fill(adam)
        if optimizers.is_hybrid(self.optimizer):
            self.optimizer._sync_sub_optimizers_state_to_hdo()
    return original(self)


def _fill(adam: Any) -> None:
    import torch

    for group in adam.param_groups:
        for parameter in group["params"]:
            # The names and types of torch's own first step.
            moments = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
            on_device = parameter.device if group["capturable"] or group["fused"] else "cpu"
            adam.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=on_device),
                **{
                    name: torch.zeros_like(parameter, memory_format=torch.preserve_format)
                    for name in moments
                },
            }


def reproduce() -> None:
    """Call `state_dict()` of an optimizer that never stepped, then step.
    On stock Megatron `state_dict()` asserts.
    """
    parameters = []
    for reads_state in (False, True):
        model = bench()
        for part in getattr(model.optimizer, "chained_optimizers", [model.optimizer]):
            if reads_state:
                part.state_dict()
        model.train_step(1, data_seed=0)
        parameters.append(model.parameters())
    if not parameters[0].equal(parameters[1]):
        raise Fault("the first step differs after a state_dict()")


PATCH = Patch(
    "loading a checkpoint asserts unless the distributed optimizer has stepped before",
    target("distributed.state_dict", state_dict),
    stock_error=r"AssertionError",
    fixed_by=((address("distributed.state_dict"), "len(self.optimizer.state) == 0"),),
)
