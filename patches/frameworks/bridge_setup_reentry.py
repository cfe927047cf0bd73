"""Megatron-Bridge, set up again on the same config, asserts on the first model's `no_sync_func`.

Symptom:
    `AssertionError: When overlap_grad_reduce is True, config.no_sync_func must be None`, from the
    second `setup()` with one `ConfigContainer`, or from a second call of
    `_update_model_config_funcs`, which NeMo-RL calls directly.

Cause:
    The model config belongs to the caller and outlives the model: it still has the `no_sync` of the
    first setup's chunks.

Affects:
    Every release, read from 0.3.1 to 0.6.2. What the patch does: before the check it clears a
    `no_sync_func` that is the bound `no_sync` of Megatron's own wrappers, of these chunks or of an
    earlier setup's. Bridge itself overwrites all other functions in the config in this way. A
    custom function still ends in the assertion. Two models that are trained alternately need
    separate configs: otherwise the first one would reduce too early in a window of several
    microbatches, which `gradient-after-reduction` turns into an error. The upper bound of the range
    is open, because the statements that the patch relies on decide.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/setup.py,
    `_update_model_config_funcs`. https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4889, "reset
    model callbacks during in-process restart", repairs it only for Bridge's own in-process restart.

Remove when:
    Bridge overwrites the function without a check, or accepts its own.
    `upstream/bridge-setup-reentry` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import (
    Original,
    Patch,
    address,
    arguments,
    no_body_has,
    target,
)

from . import _copies


def wire(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run Bridge's `_update_model_config_funcs`; first clear an earlier setup's `no_sync_func`."""
    config = arguments(original, args, kwargs)["model_config"]
    if _copies.is_megatrons_no_sync(config.no_sync_func):
        config.no_sync_func = None
    return original(*args, **kwargs)


def reproduce() -> None:
    """Run the last part of Bridge's `setup` twice for one model with overlap_grad_reduce.
    Without the patch the second call asserts on `config.no_sync_func`.
    """
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
    fixed_by=(
        (
            address("bridge.training.setup:_update_model_config_funcs"),
            "getattr(no_sync, '__func__', None) is type(model[0]).no_sync",
        ),
    ),
    stock_error=r"AssertionError: .*config\.no_sync_func must be None",
)
