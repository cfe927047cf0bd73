"""Without Transformer Engine, a model with MTP layers raises when it is built.

Symptom:
    `TypeError: isinstance() arg 2 must be a type, a tuple of types, or a union` with `when
    instantiating MultiTokenPredictionLayer`, on a machine without Transformer Engine: a laptop, or
    CI on CPUs.

Cause:
    Each MTP layer checks with `isinstance` whether its projection is of one of two inference
    classes. They derive from classes of Transformer Engine; without it Megatron has mocks instead,
    and a class that derives from a mock is a mock, which `isinstance` does not accept.

Affects:
    Megatron main from 11 August 2026 on, and the commits of NeMo-RL and Megatron-Bridge that have
    it; no release yet. What the patch does: if the two are mocks, no layer counts as one of them.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/5748 added the check.

Remove when:
    `is_inference_column_parallel_linear` returns False without Transformer Engine.
    `upstream/mtp-without-transformer-engine` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import OPEN, Original, Patch, address, bench, target


def is_inference_linear(original: Original, module: Any) -> bool:
    """Return whether `module` is an `InferenceColumnParallelLinear`.
    Return False if that class is only a mock, because Transformer Engine is missing.
    """
    from megatron.core.tensor_parallel import inference_layers

    inference_class = inference_layers.InferenceColumnParallelLinear
    return isinstance(inference_class, type) and original(module)


def reproduce() -> None:
    """Build a small model with an MTP layer.
    On stock Megatron without Transformer Engine this raises a `TypeError`.
    """
    bench(mtp=1)


PATCH = Patch(
    "a model with MTP layers cannot be built without Transformer Engine",
    target(
        "core.tensor_parallel.inference_layers:is_inference_column_parallel_linear",
        is_inference_linear,
    ),
    since="0.20",
    before=OPEN,
    fixed_by=(
        (
            address("core.tensor_parallel.inference_layers:is_inference_column_parallel_linear"),
            "not HAVE_TE",
        ),
    ),
    ranks=1,
    stock_error=r"TypeError: isinstance\(\) arg 2 must be a type",
)
