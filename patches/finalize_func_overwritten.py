"""`train()` overwrites the caller's own `config.finalize_model_grads_func`.

Symptom:
    A custom finalize function (for example, one that scales gradients by tokens, or reduces extra
    parameters) is silently not called inside `train()`, nor after it.

Cause:
    `train()` assigns upstream's `finalize_model_grads` without checking.

Affects:
    0.12 to 0.18; 0.19 assigns it only if there is none. Releases before 0.17 carry
    `megatron.training` in a source checkout only. What the patch does: during the call the module's
    name `finalize_model_grads`, which `train()` reads only in this assignment, refers to the
    caller's function. If the config has None, upstream's is set as before. On commits where
    `train()` wraps that function to reload an offloaded optimizer (slime's and miles'), it wraps
    the caller's, and the patch does not take the wrapper in the config for the caller's function.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.18.0/megatron/training/training.py, `train`.

Remove when:
    0.18 is no longer supported.
"""

from __future__ import annotations

import sys
from typing import Any

from ._case import TRAINING, Fault, Original, Patch, a_body_has, arguments, program, target


def train(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run upstream's `train` with the caller's own finalize function, if the config has one."""
    module: Any = sys.modules[TRAINING]
    config = arguments(original, args, kwargs)["config"]
    custom = config.finalize_model_grads_func
    default = module.finalize_model_grads
    if custom is None or custom is default or _is_of_train(custom):
        return original(*args, **kwargs)
    module.finalize_model_grads = custom
    try:
        return original(*args, **kwargs)
    finally:
        module.finalize_model_grads = default
        if _is_of_train(config.finalize_model_grads_func):  # it would call the default from now on
            config.finalize_model_grads_func = custom


def _is_of_train(function: Any) -> bool:
    """Return whether `function` is a wrapper that `train()` has put around a finalize function."""
    return getattr(function, "__qualname__", "").startswith("train.<locals>.") and (
        getattr(function, "__module__", None) == TRAINING
    )


def reproduce() -> None:
    """Run `train()` with a custom `finalize_model_grads_func` that counts its calls.
    On stock Megatron the custom function is not called.
    """
    from megatron.core.distributed import finalize_model_grads

    running = program()
    calls = []

    def custom(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        finalize_model_grads(*args, **kwargs)

    running.config.finalize_model_grads_func = custom
    running.train(1)
    if not calls:
        raise Fault("train() did not call the custom finalize_model_grads_func")


PATCH = Patch(
    "train() overwrites a custom config.finalize_model_grads_func",
    target("training.train", train, "config.finalize_model_grads_func = finalize_model_grads"),
    before="0.19",
    fixed_when=a_body_has("config.finalize_model_grads_func is None"),
    groups=("train-again",),
)
