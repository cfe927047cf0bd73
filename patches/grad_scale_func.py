"""Without `config.grad_scale_func` the loss is never scaled, but the gradients are unscaled.

Symptom:
    With a loss scale (fp16, or an explicit `loss_scale`) in a program that does not use
    `megatron.training.training.train`: gradients and gradient norm are too small by a factor of the
    loss scale, fp16 gradients flush to zero, and the MoE aux loss is off by the same factor against
    the rest. No error.

Cause:
    Megatron's schedules multiply the loss by `config.grad_scale_func`; the optimizer always divides
    the gradients by the loss scale. Only `train()` sets the function.

Affects:
    Every release. What the patch does: `get_megatron_optimizer` sets the function on the configs of
    its model chunks if it is None, or if it belongs to an earlier optimizer: this patch's own
    function, or the bound `scale_loss` that `train()` or a framework left there, with which a
    rebuilt optimizer's gradients would be off by the ratio of the two scales. Any other function
    stays. A reference model has no optimizer and keeps None. The function refers to the optimizer
    weakly: copies of the config do not copy the optimizer, and a pickled config has None. If the
    optimizer no longer exists, the loss is not scaled, because its gradients will not be unscaled;
    nor is it scaled in a step in which the program's loss function has called
    `optimizer.scale_loss` itself. AReaL's engine multiplies its losses by `get_loss_scale()`; its
    configs are left alone.

Upstream:
    https://github.com/NovaSky-AI/SkyRL/pull/1212 sets the function for SkyRL's Megatron worker.

Remove when:
    `get_megatron_optimizer` or the schedules wire the loss scale themselves.
    `upstream/grad-scale-func` has the repair.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_idempotent.megatron.optimizers import OURS, SCALED, LossScale, parts

from ._case import (
    Fault,
    Original,
    Patch,
    a_body_has,
    address,
    arguments,
    bench,
    step_targets,
    target,
)

# Module → class and method of frameworks that multiply their losses by the scale themselves.
_SCALE_THEMSELVES = {"areal.engine.megatron_engine": ("MegatronEngine", "train_batch")}


def build(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Build an optimizer, and set its loss scale as `grad_scale_func` of its chunks' configs.
    Functions that the caller has set stay. Nothing is set for frameworks that scale their losses
    themselves.
    """
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.utils import get_model_config

    chunks = arguments(original, args, kwargs)["model_chunks"]
    functions = [(config, config.grad_scale_func) for config in map(get_model_config, chunks)]
    optimizer = original(*args, **kwargs)
    if not isinstance(optimizer, MegatronOptimizer) or _caller_scales():
        return optimizer
    scale = LossScale(optimizer)
    for config, function in functions:
        # A function that upstream has set in the meantime is right.
        unchanged = config.grad_scale_func is function
        if unchanged and (function is None or _of_an_optimizer(function)):
            config.grad_scale_func = scale
    return optimizer


def _caller_scales() -> bool:
    """Return whether this optimizer is being built by a framework that scales its losses itself."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals
        names = _SCALE_THEMSELVES.get(module.get("__name__", ""))
        if names is not None:
            method = getattr(module.get(names[0]), names[1], None)
            return "get_loss_scale" in getattr(getattr(method, "__code__", None), "co_names", ())
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _of_an_optimizer(function: Any) -> bool:
    from megatron.core.optimizer import MegatronOptimizer

    return isinstance(function, LossScale) or (
        isinstance(getattr(function, "__self__", None), MegatronOptimizer)
        and function.__name__ == "scale_loss"
    )


def scale_loss(original: Original, self: Any, loss: Any) -> Any:
    """Scale a loss, and record that the program scales its losses itself.
    Calls by this package's `LossScale` are not recorded, nor losses without a gradient.
    """
    # A number without a gradient may be scaled just to read the scale.
    if loss.requires_grad and OURS not in vars(self):
        setattr(self, SCALED, True)
    return original(self, loss)


def step(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an optimizer's step, and reset the record that the program scaled its losses itself."""
    for part in parts(self):
        vars(part).pop(SCALED, None)
    return original(self, *args, **kwargs)


def reproduce() -> None:
    """Run the same bf16 window and step with loss scales 1 and 1024, and compare gradient norms.
    On stock Megatron without `grad_scale_func` the second norm is 1024 times too small.
    """
    from megatron.core.distributed import finalize_model_grads

    norms = []
    for loss_scale in (1.0, 1024.0):
        model = bench(dtype="bf16", loss_scale=loss_scale, overlap_grad_reduce=False, wire=False)
        model.config.finalize_model_grads_func = finalize_model_grads
        model.forward_backward(2, data_seed=0)
        _, norm, _ = model.step()
        norms.append(float(norm))
    if norms[0] != norms[1]:
        raise Fault(f"gradient norm {norms[1]} at loss scale 1024, {norms[0]} at 1")


PATCH = Patch(
    "gradients are divided by a loss scale that the loss was never multiplied by",
    target("optimizer.get_megatron_optimizer", build, "model_chunks"),
    target("any.scale_loss", scale_loss),
    *step_targets(step),
    groups=("loss-scale",),
    fixed_when=a_body_has("model_config.grad_scale_func"),
    fixed_by=(
        (
            address("optimizer._get_megatron_optimizer_based_on_param_groups"),
            "grad_scaler.scale_loss",
        ),
    ),
)
