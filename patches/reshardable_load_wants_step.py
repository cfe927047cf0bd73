"""Torch's Adam cannot load fully reshardable optimizer state.

Symptom:
    Without Transformer Engine and Apex, loading the format `fully_reshardable`, which can be loaded
    into any layout, raises `KeyError: 'step'`. Saving it reports no error. The model's weights are
    already loaded then.

Cause:
    The format leaves out the step counter, because it is in the parameter groups.
    `_set_main_param_and_optimizer_states` needs every entry of a parameter's optimizer state, and
    torch's Adam has a counter there.

Affects:
    0.15 and later, with torch's Adam or AdamW as the fallback. What the patch does: if the loaded
    state has no counter, the counter keeps the value that `load_state_dict` has set from the
    parameter groups.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/distrib_optimizer.py,
    `load_parameter_state_from_fully_reshardable`.

Remove when:
    the load accepts a state without counters. `upstream/adam-step-shared` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import optimizers

from ._case import Fault, Original, Patch, address, bench, target


def set_states(original: Original, self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    """Wrap the copy of a loaded state: if the state has no step count, add the parameter's own."""
    if "step" not in tensors and optimizers.is_torch_adam(self):
        index, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[index]["params"][order]
        tensors = {**tensors, "step": self.optimizer.state[main_param]["step"]}
    original(self, model_param, tensors)


def reproduce() -> None:
    """Load an optimizer's own state in the format `fully_reshardable`, with torch's Adam.
    On stock Megatron this raises `KeyError: 'step'`.
    """
    import torch

    model = bench()
    model.train_step(1, data_seed=0)
    params_before = model.parameters()
    (optimizer,) = model.optimizer.chained_optimizers
    state = optimizer.sharded_state_dict(
        model.chunks[0].module.sharded_state_dict(),
        metadata={"distrib_optim_sharding_type": "fully_reshardable"},
    )
    loaded = {
        index: {("fp32_param" if key == "param" else key): part.data for key, part in parts.items()}
        for index, parts in state["param_state"].items()
    }
    with torch.no_grad():
        optimizer.load_parameter_state_from_fully_reshardable(loaded)
    if not torch.equal(model.parameters(), params_before):
        raise Fault("a load of its own state has changed the parameters")


PATCH = Patch(
    "torch's Adam cannot load fully reshardable optimizer state",
    target("distributed._set_main_param_and_optimizer_states", set_states),
    since="0.15",
    came_with=(address("distributed.load_state_dict"), "sharding_type == 'fully_reshardable'"),
    given=("reshardable-state-shifted",),
    stock_error=r"KeyError: 'step'",
    fixed_by=(
        (
            address("distributed._set_main_param_and_optimizer_states"),
            "dst_tensors.keys() & tensors.keys()",
        ),
    ),
)
