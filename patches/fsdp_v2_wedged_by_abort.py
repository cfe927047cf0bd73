"""A window that raised wedges a model in the second version of Megatron-FSDP for good.

Symptom:
    After an exception or a keyboard interrupt in a forward or backward pass every later forward
    raises "Invalid FSDP module phase transition: Phase.FORWARD -> Phase.FORWARD", or BACKWARD.

Cause:
    Each module says in which phase it is, and its hooks allow the transitions of a pass that ends.
    Nothing takes the phase of an interrupted one back. Modules stay gathered besides, so that a
    later pass would compute with the weights of before the step; gradients that were not reduced
    yet stay in `grad`, and would add to the next; and some of the reduced ones are not zeroed.

Affects:
    megatron-core main, with `megatron_fsdp_version=2`. What the patch does: where a forward of the
    root module begins, outside of a backward, modules that are not at rest are brought to it:
    gathered weights are released, and gradients that were not reduced are dropped.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/d98e8a64dd/megatron/core/distributed/fsdp/src/megatron_fsdp/experimental/module.py,
    `FsdpModule.phase`, and https://github.com/NVIDIA/Megatron-LM/pull/6359.

Remove when:
    A forward of the root module starts over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._case import (
    OPEN,
    Original,
    Patch,
    abort_in_backward,
    bench,
    expect_gradients,
    no_body_has,
    target,
)


def pre_forward(original: Original, self: Any) -> None:
    """Start over where the root's forward comes upon modules of a pass that did not end."""
    if self.is_root() and not _in_backward():
        modules = list(self.context.forward_order)
        if any(module._phase is not type(module).Phase.RESTING for module in modules):
            for module in modules:
                _rest(module)
    original(self)


def _in_backward() -> bool:
    # An activation checkpoint runs forwards again inside of a backward.
    import torch

    return torch._C._current_graph_task_id() != -1


def _rest(module: Any) -> None:
    module._phase = type(module).Phase.RESTING
    if module._unshard_event is not None:
        module._reshard_parameter_groups()
    for group in module.parameter_groups:
        for parameter in group.fsdp_parameters:
            parameter.unsharded.grad = None
        # `zero_grad()` passed over those that the optimizer has no part of, because the module held
        # gathered ones in their place; upstream wants all of a group to be set, or none.
        if any(parameter.sharded.grad is None for parameter in group.fsdp_parameters):
            for parameter in group.fsdp_parameters:
                parameter.sharded.grad = None


def reproduce() -> None:
    """Interrupt a backward, and take the window again."""
    model = bench(fsdp="v2")
    model.forward_backward(1, data_seed=0)
    expected = model.gradients()
    abort_in_backward(model, lambda _, fail: _interrupted(model, fail))
    expect_gradients(model, expected)


def _interrupted(model: Any, fail: Callable[..., None]) -> Any:
    group = model.chunks[0].module.decoder.layers[0].parameter_groups[0]
    return group.fsdp_parameters[0].unsharded.register_post_accumulate_grad_hook(fail)


PATCH = Patch(
    "after a window that raised, a model in Megatron-FSDP v2 raises in every forward",
    target(
        "core.distributed.fsdp.src.megatron_fsdp.experimental.module:FsdpModule.pre_forward",
        pre_forward,
    ),
    since="0.20",
    before=OPEN,
    groups=("abort",),
    # There are no phases yet.
    fixed_when=no_body_has("FsdpModule.Phase.BACKWARD"),
    stock_error="RuntimeError: Invalid FSDP module phase transition",
)
