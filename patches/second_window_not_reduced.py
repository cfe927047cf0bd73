"""Gradients of a second window are not reduced, or reduced to wrong values, without zeroing.

Symptom:
    Two windows are both reduced, with no `zero_grad_buffer()` in between. With overlap_grad_reduce:
    from 0.18 on the second window's gradients stay local, so that they differ between data-parallel
    ranks, without an error; before 0.18, `AssertionError: Cannot set grad twice` (0.12 to 0.15) or
    `Communication call has not been issued for this bucket` (0.16, 0.17). With the distributed
    optimizer, per-token loss or expert parallelism: wrong values, with or without overlap.

Cause:
    Bucket groups reduce once per `reset()`. A buffer that is reduced a second time holds the sum of
    reduced and local gradients. An average over ranks is still right, because the reduced part is
    the same on all ranks; a sum counts that part once per rank, and after a reduce-scatter all but
    the rank's own shard is still local.

Affects:
    Every release. What the patch does: if a second reduction is exact (an all-reduce that
    averages), it runs. If it is not, `finish_grad_sync` or `finalize_model_grads` raises. Zeroing
    gradients without `zero_grad_buffer()` may not be noticed.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/param_and_grad_buffer.py,
    `_ParamAndGradBucketGroup.finish_grad_sync`. https://github.com/NVIDIA-NeMo/RL/pull/3660 repairs
    it in NeMo-RL: "reduce and finalize gradients once per step, not per chunk".

Remove when:
    upstream reduces a second time correctly in one window, or raises.
    `upstream/second-window-not-reduced` has the repair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_idempotent.megatron import ddp

from ._case import Fault, Original, Patch, bench, target

_CHECKED = "_megatron_idempotent_checked_versions"
_ZEROED = "_megatron_idempotent_zeroed"
_AGAIN = "_megatron_idempotent_reduced_again"


def finish_grad_sync(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Finish a chunk's reduction; if gradients were added to reduced ones, reduce the sum again.
    Raise if that second reduction would give wrong values.
    """
    if ddp.grown(self):
        _require_exact(self)
        setattr(self, _AGAIN, True)
        for group in ddp.bucket_groups(self):
            if hasattr(group, "grad_reduce_finished"):
                group.grad_reduce_finished = False
    original(self, *args, **kwargs)
    if self.ddp_config.overlap_grad_reduce:
        for group in ddp.bucket_groups(self):
            if not getattr(group, "is_first_batch", False):
                ddp.drop_registered(group)  # so that hooks dispatch the next window's
    _finished(self)


def start_all(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Start a chunk's reductions.
    Without overlap, raise if gradients were reduced before, and a second reduction would be wrong.
    """
    if self.ddp_config.overlap_grad_reduce:
        original(self, *args, **kwargs)
        return
    if ddp.grown(self):
        _require_exact(self)
    original(self, *args, **kwargs)
    _finished(self)


def _finished(chunk: Any) -> None:
    ddp.finished(chunk)
    setattr(chunk, _ZEROED, False)


def _require_exact(chunk: Any) -> None:
    for group in ddp.bucket_groups(chunk):
        reason = _inexact(group)
        if reason and not getattr(chunk, _ZEROED, False):
            _refuse([chunk], reason)


def finalize(original: Original, model: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap `finalize_model_grads`: raise if it would sum or divide reduced gradients again."""
    chunks = list(model)
    if any(ddp.grown(chunk) and not getattr(chunk, _ZEROED, False) for chunk in chunks):
        num_tokens = args[0] if args else kwargs.get("num_tokens")
        reason = _sums_elsewhere(chunks, num_tokens)
        if reason:
            _refuse(chunks, reason)
    original(model, *args, **kwargs)


def forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a chunk's forward: record if the caller has zeroed the reduced gradients by itself."""
    reduced = ddp.reduced(self)
    if reduced is not None and not getattr(self, _ZEROED, False):
        _look_for_zeros(self, reduced)
    return original(self, *args, **kwargs)


def _look_for_zeros(chunk: Any, reduced: tuple[int, ...]) -> None:
    import torch
    from megatron.core.transformer.cuda_graphs import is_graph_capturing

    versions = ddp.versions(chunk)
    if versions == getattr(chunk, _CHECKED, reduced) or not torch.is_grad_enabled():
        return
    if not is_graph_capturing():
        setattr(chunk, _CHECKED, versions)
        # A sum of zeros is exact, even if it counts them twice. Only programs that keep the
        # gradients of a window until the next one wait for the device here.
        gradients = [grad for grad in ddp.gradients(chunk) if grad.untyped_storage().size()]
        setattr(chunk, _ZEROED, not any(bool(grad.any()) for grad in gradients))


def zero_grad_buffer(original: Original, self: Any) -> None:
    """Wrap `zero_grad_buffer`: also reset this patch's records of the chunk's reductions."""
    if getattr(self, _AGAIN, False) or ddp.grown(self):
        for group in ddp.bucket_groups(self):
            # Upstream must not learn the counts of two windows together, nor those of a window that
            # raised: the next window counts as the first.
            if getattr(group, "is_first_batch", False):
                ddp.drop_registered(group)
    original(self)
    ddp.began(self)
    setattr(self, _ZEROED, False)
    setattr(self, _AGAIN, False)


def _inexact(group: Any) -> str | None:
    """Return why a second reduction of a bucket group's gradients would be wrong; None if right."""
    config = group.ddp_config
    if not config.use_distributed_optimizer:
        ranks = group.data_parallel_group.size()
    elif group.intra_distributed_optimizer_instance_size > 1:
        return "after a reduce-scatter all but the rank's own shard is still local"
    else:
        ranks = config.num_distributed_optimizer_instances
    exact = 1.0 if config.average_in_collective else 1.0 / ranks
    if all(bucket.gradient_scaling_factor == exact for bucket in group.buckets):
        return None
    factor = group.buckets[0].gradient_scaling_factor
    return f"a sum over {ranks} ranks scaled by {factor:g} does not count them exactly once"


def _sums_elsewhere(chunks: Sequence[Any], num_tokens: Any) -> str | None:
    """Return why `finalize_model_grads` must not run again on reduced gradients; None if it may.
    It must not if it would sum them over tensor-parallel ranks or pipeline stages, or divide them
    by the number of tokens, a second time.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import get_attr_wrapped_model, get_model_config

    config = get_model_config(chunks[0])
    if num_tokens is not None:
        return "they are already divided by the number of tokens"
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    if tensor > 1 and (config.sequence_parallel or config.qk_layernorm):
        return f"layer norms' gradients are already summed over {tensor} tensor-parallel ranks"
    if parallel_state.get_pipeline_model_parallel_world_size() > 1 and any(
        get_attr_wrapped_model(chunk, "share_embeddings_and_output_weights") for chunk in chunks
    ):
        return "shared embeddings' gradients are already summed over pipeline stages"
    return None


def _refuse(chunks: Sequence[Any], reason: str) -> None:
    for chunk in chunks:
        ddp.wait(chunk)
    raise RuntimeError(
        "gradients were added to gradients that were already reduced, without zero_grad_buffer() "
        f"in between, and cannot be reduced again: {reason}. Call zero_grad_buffer() before each "
        "window; or, to accumulate over several, set config.finalize_model_grads_func = None, use "
        "no_sync() around all windows but the last, and finalize once"
    )


def reproduce() -> None:
    """Run two windows, each with a reduction, without zeroing gradients between them.
    On stock Megatron the second window is not reduced, or a reduce-scatter is repeated unnoticed.
    """
    gradients = []
    for overlap in (True, False):
        model = _two_windows(overlap_grad_reduce=overlap, distributed_optimizer=False)
        gradients.append(model.gradients())
    if not gradients[0].equal(gradients[1]):
        raise Fault("gradients of a second window are not reduced")
    try:
        _two_windows(overlap_grad_reduce=True, distributed_optimizer=True)
    except RuntimeError as error:
        if "cannot be reduced again" in str(error):
            return
        raise
    raise Fault("a second reduce-scatter of the same gradients went unnoticed")


def _two_windows(**options: Any) -> Any:
    model = bench(with_optimizer=False, **options)
    model.forward_backward(2, data_seed=0)
    # A second window that zeroes first, so that upstream has learned the counts.
    model.forward_backward(2, data_seed=1)
    model.forward_backward(2, data_seed=2, zero_first=False)
    return model


def control() -> object:
    """Run second windows that stock Megatron reduces correctly, as a control.
    Return the gradients' bytes.
    """
    from . import _controls

    bits = []
    for distributed in (False, True):
        model = _controls.build(overlap=False, distributed=distributed)
        for data_seed in range(3):
            if distributed:  # reducing zeros again is exact
                for gradients in ddp.gradients(model.chunks[0]):
                    gradients.zero_()
            model.forward_backward(2, data_seed=data_seed, zero_first=False)
            model.chunks[0].finish_grad_sync()
            model.forward_backward(1, data_seed=9, forward_only=True)
            bits.append(model.gradients().numpy().tobytes())
    model = _controls.build(overlap=True, distributed=True, wired=False)
    (chunk,) = model.chunks
    for _ in range(2):
        chunk.zero_grad_buffer()
        with chunk.no_sync():  # gradients that are never reduced
            model.forward_backward(1, data_seed=7, zero_first=False)
        bits.append(model.gradients().numpy().tobytes())
        _controls.step(model, (1, 1), held=True, data_seed=3)
        bits.append(_shards(model))
    if bits[-4:-2] != bits[-2:]:
        raise Fault("the same windows have other gradients the second time")
    return bits


def _shards(model: Any) -> bytes:
    """Return the bytes of this rank's shard of each bucket's gradients.
    After a reduce-scatter the rank has the right sum in this shard only.
    """
    import torch

    shards = [
        bucket.grad_data.tensor_split(group.intra_distributed_optimizer_instance_size)[
            group.intra_distributed_optimizer_instance_rank
        ]
        for group in ddp.bucket_groups(model.chunks[0])
        for bucket in group.buckets
    ]
    shard_bytes: bytes = torch.cat(shards).cpu().numpy().tobytes()
    return shard_bytes


PATCH = Patch(
    "a second window without zero_grad_buffer() is not reduced, or to wrong values",
    target("ddp.finish_grad_sync", finish_grad_sync),
    target("ddp.start_grad_sync", start_all),
    target("ddp.zero_grad_buffer", zero_grad_buffer),
    target("finalize.finalize_model_grads", finalize),
    target("chunk.forward", forward),
    target("group.start_grad_sync", ddp.dispatching),
    groups=("overlap",),
    stock_error=r"Cannot set grad twice|Communication call has not been issued"
    r"|gradients of a second window are not reduced|has registered 2 gradients",
    loudness="both",
)
