"""A window that raised leaves a model in the second version of Megatron-FSDP unusable.

Symptom:
    After an exception or a keyboard interrupt in a forward or backward pass every later forward
    raises "Invalid FSDP module phase transition: Phase.FORWARD -> Phase.FORWARD", or BACKWARD.

Cause:
    Each module has a phase, and its hooks allow only the transitions of a complete pass. The phase
    of an interrupted pass is never reset. Modules also stay gathered, so that a later pass would
    use the weights from before the step; gradients that were not reduced yet stay in `grad`, and
    would add to the next ones; and some reduced gradients are not zeroed.

Affects:
    megatron-core main, with `megatron_fsdp_version=2`. What the patch does: when a forward of the
    root module begins, outside of a backward, it resets modules that are not at rest: it releases
    gathered weights, and drops gradients that were not reduced.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/d98e8a64dd/megatron/core/distributed/fsdp/src/megatron_fsdp/experimental/module.py,
    `FsdpModule.phase`, and https://github.com/NVIDIA/Megatron-LM/pull/6359.

Remove when:
    a forward of the root module resets the phases.
    `upstream/fsdp-v2-wedged-by-abort` has the repair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._case import (
    OPEN,
    Original,
    Patch,
    abort_in_backward,
    address,
    bench,
    expect_gradients,
    no_body_has,
    target,
)

_PRE_FORWARD = address(
    "core.distributed.fsdp.src.megatron_fsdp.experimental.module:FsdpModule.pre_forward"
)


def pre_forward(original: Original, self: Any) -> None:
    """Wrap a module's pre-forward hook: reset all modules of an interrupted pass.
    Only the root module does so.
    """
    if self.is_root() and not _in_backward():
        modules = list(self.context.forward_order)
        if any(_interrupted(module, self) for module in modules):
            for module in modules:
                _reset(module)
    original(self)


def _interrupted(module: Any, root: Any) -> bool:
    if module._phase is not type(module).Phase.RESTING:
        return True
    # The pass raised between two modules, and the next one was gathered ahead. A root module can
    # have been gathered ahead by a complete pass, that of the root module before it.
    return module._unshard_event is not None and module is not root


def _in_backward() -> bool:
    # An activation checkpoint runs forwards again inside of a backward.
    import torch

    return torch._C._current_graph_task_id() != -1


def _reset(module: Any) -> None:
    module._phase = type(module).Phase.RESTING
    module._reshard_parameter_groups()
    for group in module.parameter_groups:
        for parameter in group.fsdp_parameters:
            parameter.unsharded.grad = None
        # `zero_grad()` skipped parameters without a shard on this rank, because the module held
        # gathered ones instead; upstream requires that all gradients of a group are set, or none.
        if any(parameter.sharded.grad is None for parameter in group.fsdp_parameters):
            for parameter in group.fsdp_parameters:
                parameter.sharded.grad = None


def reproduce() -> None:
    """Interrupt a backward under the second version of Megatron-FSDP, and run the window again.
    On stock Megatron the forward of the second run raises an invalid phase transition.
    """
    model = bench(fsdp="v2")
    model.forward_backward(1, data_seed=0)
    expected = model.gradients()
    abort_in_backward(model, lambda _, fail: _add_hook(model, fail))
    expect_gradients(model, expected)


def _add_hook(model: Any, fail: Callable[..., None]) -> Any:
    group = model.chunks[0].module.decoder.layers[0].parameter_groups[0]
    return group.fsdp_parameters[0].unsharded.register_post_accumulate_grad_hook(fail)


PATCH = Patch(
    "after a window that raised, a model in Megatron-FSDP v2 raises in every forward",
    target(_PRE_FORWARD, pre_forward),
    since="0.20",
    before=OPEN,
    groups=("abort",),
    # Older code has no phases.
    fixed_when=no_body_has("FsdpModule.Phase.BACKWARD"),
    fixed_by=((_PRE_FORWARD, "FsdpModule.Phase.RESTING"),),
    stock_error="RuntimeError: Invalid FSDP module phase transition",
)
