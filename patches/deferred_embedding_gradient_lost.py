"""Without a finalize function, a deferred embedding gradient is never computed.

Symptom:
    With `defer_embedding_wgrad_compute` and `config.finalize_model_grads_func = None`, the common
    way to chain several schedule calls into one step, the output layer's gradient stays zero. Its
    activations and output gradients stay in memory until a call that finalizes, which then raises
    `AssertionError: Length of activation and gradient buffers need to be equal!`.

Cause:
    The schedules compute the deferred gradient under the same `if` that calls the finalize
    function.

Affects:
    Every release. There is no patch, because a caller may drain the lists itself. Inside of
    `accumulation_window(chunks, total_microbatches=n)` every call computes what it deferred, and
    the last one finalizes; the caller leaves `finalize_model_grads_func` in place.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/pipeline_parallel/schedules.py,
    `finish_embedding_wgrad_compute` and its callers.

Remove when:
    the deferred gradient is computed whether or not there is a finalize function.
"""

from __future__ import annotations

import contextlib
from typing import Any

from . import _deferred_embedding
from ._case import Fault, Helper


def reproduce(*, helped: bool) -> None:
    """Run two schedule calls without a finalize function, then finalize by hand.
    The output layer's deferred gradient is then zero. With `helped` an `accumulation_window` runs
    both calls, and the gradient is computed.
    """
    from megatron.core.distributed import finalize_model_grads

    model = _deferred_embedding.build(overlap_grad_reduce=False)
    if not helped:
        model.config.finalize_model_grads_func = None
    with _window(model) if helped else contextlib.nullcontext():
        for _ in range(2):
            model.forward_backward(2, data_seed=0, zero_first=False)
    if not helped:
        finalize_model_grads(model.chunks)
    _expect_gradient(model)


def control(*, helped: bool) -> bytes:
    """Compute the deferred gradient in one schedule call that finalizes, as a control.
    With `helped` the call runs in an `accumulation_window`. Return the gradients' bytes.
    """
    model = _deferred_embedding.build(overlap_grad_reduce=False)
    with _window(model) if helped else contextlib.nullcontext():
        model.forward_backward(4, data_seed=0, zero_first=not helped)
    _expect_gradient(model)
    bits: bytes = model.gradients().numpy().tobytes()
    return bits


def _window(model: Any) -> Any:
    from megatron_idempotent.window import accumulation_window

    return accumulation_window(model.chunks, total_microbatches=4)


def _expect_gradient(model: Any) -> None:
    weight = _deferred_embedding.output_weight(model)
    if weight is not None and not weight.main_grad.any():
        raise Fault("the output layer's gradient is zero")


HELPER = Helper(
    summary="chained calls without a finalize function never compute a deferred embedding gradient",
    call="accumulation_window",
    loudness="both",
)
