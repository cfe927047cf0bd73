"""verl's wiring asserts on its own `no_sync_func`: run twice, or with virtual pipeline stages.

Symptom:
    `AssertionError: When overlap_grad_reduce is True, config.no_sync_func must be None` from
    `register_megatron_training_hooks`: at its second call for a model, and with virtual pipeline
    stages at the first.

Cause:
    For each chunk of a rank it installs the `no_sync` of all chunks in the chunk's config. verl
    gives all chunks one config, so the second chunk finds the functions that it installed for the
    first.

Affects:
    0.6.1 on, read to 0.7.0; before that verl did not set the functions. What the patch does: a
    `no_sync_func` that is the `no_sync` of these very chunks is cleared before the check, and
    during the call each further chunk has a copy of the shared config. A custom function still ends
    in the assertion. The upper bound of the range is open, because the statements that the patch
    relies on decide.

Upstream:
    https://github.com/volcengine/verl/blob/v0.7.0/verl/utils/megatron_utils.py,
    `register_megatron_training_hooks`.

Remove when:
    verl accepts the chunks' own `no_sync`. `upstream/verl-wiring-reentry` has the repair.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron_idempotent.patches._case import (
    Fault,
    Original,
    Patch,
    arguments,
    no_body_has,
    program,
    target,
)

from . import _copies


def wire(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run `register_megatron_training_hooks` so that second calls and shared configs do not fail.
    First clear a `no_sync_func` of these chunks. During the call, a chunk that shares an earlier
    chunk's config gets a copy of it.
    """
    chunks = arguments(original, args, kwargs)["model"]
    configs: list[Any] = []
    sharing: list[tuple[Any, Any]] = []
    for chunk in chunks:
        config = getattr(chunk, "config", None)
        if config is None:
            continue
        _copies.forget_no_sync(config, chunks)
        if any(config is earlier for earlier in configs):
            sharing.append((chunk, config))
        configs.append(config)
    for chunk, config in sharing:
        chunk.config = copy.copy(config)
    try:
        return original(*args, **kwargs)
    finally:
        for chunk, config in sharing:
            chunk.config = config


def reproduce() -> None:
    """Wire a model of two virtual pipeline stages per rank, which share a config.
    Without the patch the second chunk asserts on `config.no_sync_func`.
    """
    from ._standins import import_alone

    running = program(["--overlap-grad-reduce"], pp=2, vpp=2, shared_config=True)
    verl = import_alone("verl.utils.megatron_utils", "transformers")
    verl.register_megatron_training_hooks(running.chunks, running.optimizer)
    if len(running.config.no_sync_func) != 2:
        raise Fault("not all chunks are wired")


PATCH = Patch(
    "verl's wiring asserts on its own config.no_sync_func with virtual pipeline stages",
    target(
        "verl.utils.megatron_utils:register_megatron_training_hooks",
        wire,
        "config = get_model_config(one_model)",
        "config.no_sync_func = [model_chunk.no_sync for model_chunk in model]",
    ),
    since="0.6.1",
    fixed_when=no_body_has("config.no_sync_func is None"),
    fixed_by=(
        (
            "verl.utils.megatron_utils:register_megatron_training_hooks",
            "config.no_sync_func in "
            "(None, model[0].no_sync, [model_chunk.no_sync for model_chunk in model])",
        ),
    ),
    stock_error=r"AssertionError: .*config\.no_sync_func must be None",
)
