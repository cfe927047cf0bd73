"""A deferred embedding gradient misses its reduction if reductions overlap the backward.

Symptom:
    With `defer_embedding_wgrad_compute` and `overlap_grad_reduce`, the output layer's gradient is
    lost or never reduced over the data-parallel ranks: from the second window on since 0.16, in
    every window before. No error.

Cause:
    The last backward dispatches the reduction of the output layer's bucket; the schedule computes
    the deferred gradient after that.

Affects:
    Every release, seen on gloo ranks with a Python version of the fused kernel. What the patch
    does: the reduction of the output layer's bucket group waits until the deferred gradient is
    computed, which is the last gradient on every rank. If it is never computed, because
    `config.finalize_model_grads_func` is None, finishing the reductions raises.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/pipeline_parallel/schedules.py,
    the end of both schedules with pipelining.

Remove when:
    the schedules compute the deferred gradient before they dispatch the reductions.
    `upstream/deferred-embedding-reduced-early` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import ddp, schedules
from megatron_idempotent.patching.weak_keys import PerProcessWeakKeys

from . import _deferred_embedding
from ._case import PIPELINED, Fault, Original, Patch, address, bench, schedule_targets, target

#: Bucket group with a deferred gradient that is not computed yet → whether its reduction waits.
_deferring: PerProcessWeakKeys[Any, bool] = PerProcessWeakKeys(__name__, "_deferring")


def schedule(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run a pipelined schedule, and postpone the reduction of the bucket with a deferred gradient.
    That gradient, of the output layer, is computed at the end of the schedule.
    """
    group = None if kwargs.get("forward_only", False) else _group(kwargs["model"])
    if group is None:
        return original(*args, **kwargs)
    _deferring[group] = False
    ddp.postpone(group, True)
    try:
        return original(*args, **kwargs)
    except BaseException:
        _defer_no_more(group)
        raise


def _defer_no_more(group: Any) -> bool | None:
    ddp.postpone(group, False)
    return _deferring.pop(group, None)


def _group(model: Any) -> Any:
    # The bucket group of the deferred weight, if its reduction overlaps the backward.
    chunk = schedules.chunks(model)[-1]
    weight = schedules.weight(chunk)
    if weight is None or not hasattr(chunk, "param_to_bucket_group"):
        return None
    return chunk.param_to_bucket_group[weight] if chunk.ddp_config.overlap_grad_reduce else None


def start_grad_sync(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Start a bucket group's reduction, or postpone it until its deferred gradient is computed."""
    if self in _deferring:
        _deferring[self] = True
    else:
        original(self, *args, **kwargs)


def finish_grad_sync(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Finish a bucket group's reduction; raise if its deferred gradient was never computed."""
    if _defer_no_more(self) is not None:
        raise RuntimeError(
            "the output layer's gradient is deferred and was not computed: the schedule does that "
            "if config.finalize_model_grads_func is set. Set it; to accumulate over several "
            "calls, use megatron_idempotent.window.accumulation_window()"
        )
    original(self, *args, **kwargs)


def reset(original: Original, self: Any) -> None:
    """Reset a bucket group, and drop the record of a deferred gradient of the last window."""
    _defer_no_more(self)
    original(self)


def drain(
    original: Original,
    config: Any,
    embedding_activation_buffer: list[Any],
    grad_output_buffer: list[Any],
    weight: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Compute the deferred gradient, then start the bucket group's reduction that waits for it."""
    if embedding_activation_buffer or grad_output_buffer:
        original(config, embedding_activation_buffer, grad_output_buffer, weight, *args, **kwargs)
    # If both are empty, guarded_window() dropped them after a failure; peers still reduce.
    for group in list(_deferring):
        if weight in group.params and _defer_no_more(group):
            group.start_grad_sync()


def reproduce() -> None:
    """Compare the output layer's gradient of a second window, deferred and not.
    On stock Megatron the deferred gradient misses the overlapped reduction.
    """
    import torch

    gradients = []
    for model in (bench(pp=2), _deferred_embedding.build()):
        for data_seed in range(2):
            model.forward_backward(2, data_seed=data_seed)
        weight = _deferred_embedding.output_weight(model)
        gradients.append(torch.zeros(1) if weight is None else weight.main_grad.clone())
    if not torch.equal(*gradients):
        plain, deferred = (f"{gradient.norm():.4g}" for gradient in gradients)
        raise Fault(f"output layer's gradient norm {deferred} deferred, {plain} not")


def control() -> object:
    """Compare steps with and without a deferred gradient, where both are right, as a control.
    They run without overlapped reductions, and once with overlap in a first window.
    """
    from . import _controls

    bits = []
    for overlap, windows in ((False, (2, 3, 2)), (True, (2,))):
        plain = bench(pp=2, overlap_grad_reduce=overlap)
        deferring = _deferred_embedding.build(overlap_grad_reduce=overlap)
        if overlap and not _controls.learns(plain):
            continue
        for data_seed, microbatches in enumerate(windows):
            norms = []
            for model in (plain, deferring):
                model.forward_backward(microbatches, data_seed=data_seed)
                norms.append(model.step()[1])
            if norms[0] != norms[1]:
                raise Fault(f"gradient norm {norms[1]} deferred, {norms[0]} not")
            bits.append(deferring.bits())
    return bits


PATCH = Patch(
    "overlapped reductions miss a deferred embedding gradient",
    *schedule_targets(schedule, *PIPELINED),
    target("group.start_grad_sync", start_grad_sync),
    target("group.finish_grad_sync", finish_grad_sync),
    target("group.reset", reset),
    target("utils.drain_embedding_wgrad_compute", drain),
    groups=("deferred-embedding",),
    fixed_by=((address("group.start_grad_sync"), "param.start_deferred_grad_sync"),),
    provides=("deferred-embedding-ordered",),
    ranks=4,
)
