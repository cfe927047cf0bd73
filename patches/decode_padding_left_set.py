"""Generation wipes the capacity factor of MoE training, and pads the experts of another model.

Symptom:
    After `set_decode_expert_padding(model, False)`, which inference calls at every prefill and
    Megatron's RL code at the end of generation, training drops no token and pads nothing, whatever
    `moe_expert_capacity_factor` and `moe_pad_expert_input_to_capacity` were. A call for a second
    model (a reference model) changes the first model's layers instead of its own. No error.

Cause:
    The function overwrites the training config without keeping a copy, and caches the MoE layers of
    the first model that it is called for, once per process.

Affects:
    0.15 on, where the function appeared. What the patch does: a call sets the layers of its own
    model; and the next pipeline schedule, of training or of log-probabilities, starts with the
    values from before the first call. Generation itself sees the values that it set.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/inference/utils.py,
    `set_decode_expert_padding`.

Remove when:
    the function restores the earlier values, per model. `upstream/decode-padding-left-set` has the
    repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patching.weak_keys import PerProcessWeakKeys

from ._case import Fault, Original, Patch, schedule_targets, target

_CONFIG = ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity")
_LAYER = ("drop_and_pad", "moe_expert_capacity_factor", "cuda_sync_point")
_MISSING = object()

#: (object, name, value) from before the first call since a schedule ran.
_saved: list[tuple[Any, str, Any]] = []
_layers: PerProcessWeakKeys[Any, list[Any]] = PerProcessWeakKeys(__name__, "_layers")


def set_padding(original: Original, model: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap `set_decode_expert_padding`: change only this model's layers, and keep the old settings.
    Upstream changes the layers of the first model that it was called for.
    """
    from megatron.core.inference import utils
    from megatron.core.utils import get_model_config

    utils.moe_layer_cache = _layers.get(model)
    utils._init_moe_expert_cache(model)
    layers = _layers[model] = utils.moe_layer_cache
    _keep(get_model_config(model), _CONFIG)
    for layer in layers:
        for part in (layer.token_dispatcher, layer.router):
            _keep(part, _LAYER)
            if hasattr(part, "config"):
                _keep(part.config, _CONFIG)
    original(model, *args, **kwargs)


def _keep(holder: Any, names: tuple[str, ...]) -> None:
    if any(saved is holder for saved, _, _ in _saved):
        return
    _saved.extend((holder, name, vars(holder).get(name, _MISSING)) for name in names)


def schedule(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run a schedule, but first restore the expert padding settings from before generation."""
    while _saved:
        holder, name, value = _saved.pop()
        if value is not _MISSING:
            setattr(holder, name, value)
        elif name in vars(holder):
            delattr(holder, name)
    return original(*args, **kwargs)


def reproduce() -> None:
    """Train, call `set_decode_expert_padding` for this and a second model, and train again.
    On stock Megatron the first model loses its capacity factor, and the second one still pads.
    """
    from megatron.core.inference.utils import set_decode_expert_padding

    from megatron_idempotent.proof.cpu import tiny

    capacity = {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True}
    model, reference = (tiny.build(experts=4, config_overrides=capacity) for _ in range(2))

    def padded(bench: tiny.Tiny) -> bool:
        layer = bench.chunks[0].module.decoder.layers[0].mlp
        return bool(layer.token_dispatcher.drop_and_pad)

    model.forward_backward(1, data_seed=0)
    gradients = model.gradients()
    set_decode_expert_padding(model.chunks[0].module, False)
    set_decode_expert_padding(reference.chunks[0].module, True, 2.0)
    set_decode_expert_padding(reference.chunks[0].module, False)
    if padded(reference):
        raise Fault("the reference model's experts still pad")
    model.forward_backward(1, data_seed=0)
    if not padded(model) or not model.gradients().equal(gradients):
        raise Fault("the same window drops other tokens after generation")


PATCH = Patch(
    "generation wipes the MoE capacity factor from training, and pads another model",
    target("core.inference.utils:set_decode_expert_padding", set_padding),
    *schedule_targets(schedule),
    since="0.15",
    groups=("generation",),
    ranks=1,
)
