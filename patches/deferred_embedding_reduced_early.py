"""A deferred embedding gradient misses its reduction where reductions overlap the backward.

Symptom:
    With `defer_embedding_wgrad_compute` and `overlap_grad_reduce`, the output layer's gradient is
    lost or never reduced over the data-parallel ranks: from the second window on since 0.16, in
    every window before. No error.

Cause:
    The last backward dispatches the reduction of the output layer's bucket; the schedule computes
    the deferred gradient behind that.

Affects:
    Every release, seen on gloo ranks with the fused kernel's sum done in Python. Keep away from the
    combination: defer the embedding gradient without overlap, or overlap without deferring it.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/pipeline_parallel/schedules.py,
    the end of both schedules with pipelining.

Remove when:
    the schedules compute the deferred gradient before they dispatch the reductions.
"""

from __future__ import annotations

from megatron_idempotent.engine import Limit, Reproduction

from . import _deferred_embedding, _schedules


def reproduce() -> None:
    """The second window's gradient of the output layer, deferred and not, on two replicas."""
    import torch

    from megatron_idempotent.cpu import tiny

    found = []
    for model in (tiny.build(pp=2), _deferred_embedding.build()):
        for data_seed in range(2):
            model.forward_backward(2, data_seed=data_seed)
        weight = _deferred_embedding.output_weight(model)
        found.append(torch.zeros(1) if weight is None else weight.main_grad.clone())
    if not torch.equal(*found):
        plain, deferred = (f"{gradient.norm():.4g}" for gradient in found)
        raise RuntimeError(f"output layer's gradient norm {deferred} deferred, {plain} not")


LIMIT = Limit(
    id="deferred-embedding-reduced-early",
    summary="overlapped reductions miss a deferred embedding gradient",
    since="0.12",
    before="0.20",
    upstream=_schedules.UPSTREAM,
    reproduction=Reproduction(
        run=reproduce,
        ranks=4,
        stock_error=r"RuntimeError: output layer's gradient norm .* deferred",
    ),
)
