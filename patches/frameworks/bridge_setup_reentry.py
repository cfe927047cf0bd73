"""Megatron-Bridge, set up again on the same config, asserts on the first model's `no_sync_func`.

Symptom:
    `AssertionError: When overlap_grad_reduce is True, config.no_sync_func must be None`, from the
    second `setup()` with one `ConfigContainer`, or from `_update_model_config_funcs` called again,
    as NeMo-RL calls it by itself.

Cause:
    The model config belongs to the caller and outlives the model: it still holds the `no_sync` of
    the chunks of the first setup.

Affects:
    Every release, read from 0.3.1 to 0.6.2. What the patch does: before the check it clears a
    `no_sync_func` that is the bound `no_sync` of Megatron's own wrappers, be it of these chunks or
    of those of an earlier setup: everything else that Bridge puts into the config is taken over in
    the same way. Somebody's own function still meets the assertion. Two models that are trained in
    turn need a config each: in a window of several microbatches the first one would reduce too
    early, which `gradient-after-reduction` turns into an error. The upper bound of the range is
    open, because the statements that the patch relies on decide.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/setup.py,
    `_update_model_config_funcs`. https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4889, "reset
    model callbacks during in-process restart", mends it for Bridge's own in-process restart alone.

Remove when:
    Bridge assigns the function without looking, or looks whose it is.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Original, Patch, arguments, no_body_has, target

from . import _copies


def wire(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Clear the `no_sync` of an earlier setup, then run `_update_model_config_funcs`."""
    config = arguments(original, args, kwargs)["model_config"]
    if _copies.is_megatrons_no_sync(config.no_sync_func):
        config.no_sync_func = None
    return original(*args, **kwargs)


def reproduce() -> None:
    """Wire one model twice."""
    from ._bridge import Bridge

    bridge = Bridge(["--overlap-grad-reduce"])
    bridge.wire()
    bridge.wire()


PATCH = Patch(
    "Megatron-Bridge, set up again on one config, asserts on config.no_sync_func",
    target(
        "bridge.training.setup:_update_model_config_funcs",
        wire,
        "model_config.no_sync_func = [model_chunk.no_sync for model_chunk in model]",
    ),
    since="0.3",
    fixed_when=no_body_has("model_config.no_sync_func is None"),
    stock_error=r"AssertionError: .*config\.no_sync_func must be None",
)
