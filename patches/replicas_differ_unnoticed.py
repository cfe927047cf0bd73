"""Megatron does not notice when replicas on different ranks differ: a debug mode does.

Symptom:
    Ranks step on different gradients, or from different parameters, for any of the reasons in the
    other case files or for an unknown one: the loss goes down, more slowly. No error.

Cause:
    The optimizer uses the buffers as they are. Upstream's `check_weight_hash_across_dp_replicas`
    compares parameters if a program calls it; no function compares gradients.

Affects:
    Every release. Off by default; `MEGATRON_IDEMPOTENT_CHECK=1` switches it on; otherwise no
    function is wrapped. What it does: before each step of an optimizer from
    `get_megatron_optimizer` it gathers checksums over the data-parallel groups, and raises
    `ReplicaMismatchError` with the first parameter, the bucket group and the ranks. It compares how
    often each bucket group was reduced; parameters; and, with an all-reduce, gradients. Over the
    tensor-parallel groups it compares parameters that are not marked `tensor_model_parallel`. From
    the second step on it names a parameter whose gradient is not summed over these ranks, such as a
    replicated factor of LoRA under sequence parallelism, or a shard without the mark, which norms
    leave out. It costs a pass over gradients and parameters, and a small all-gather per group. Do
    not switch it on in programs that reduce gradients outside of Megatron's DDP, or that keep
    replicas over tensor-parallel ranks and have kernels that round differently on each call.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/optimizer.py,
    `step`. A case that stayed unnoticed for months:
    https://github.com/modelscope/mcore-bridge/pull/173.

Remove when:
    upstream compares gradients between replicas on request. By design: a step trusts the
    reduction, and to compare gradients before each step would be a feature; a caller who suspects
    that replicas differ compares parameters, by `--check-weight-hash-across-dp-replicas-interval`.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron.ddp import GATHERED, REDUCTIONS, bucket_groups

from ._case import Fault, Original, Patch, arguments, bench, step_targets, target

_CHUNKS = "_megatron_idempotent_chunks"


def build(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Build an optimizer, and store on it the list of model chunks that it updates."""
    from megatron.core.optimizer import MegatronOptimizer

    optimizer = original(*args, **kwargs)
    if isinstance(optimizer, MegatronOptimizer):
        setattr(optimizer, _CHUNKS, list(arguments(original, args, kwargs)["model_chunks"]))
    return optimizer


def step(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap an optimizer's step: first raise if gradients or parameters of replicas differ."""
    from megatron_idempotent.megatron.replica_check import check_replicas

    chunks = getattr(self, _CHUNKS, ())
    check_replicas(chunks)
    result = original(self, *args, **kwargs)
    for chunk in chunks:
        for group in bucket_groups(chunk):
            setattr(group, GATHERED, False)
    return result


def start_grad_sync(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap a bucket group's `start_grad_sync`: count its reductions in this window."""
    in_flight = self.grad_reduce_handle is not None
    original(self, *args, **kwargs)
    if not in_flight:
        setattr(self, REDUCTIONS, getattr(self, REDUCTIONS, 0) + 1)


def reset(original: Original, self: Any) -> None:
    """Wrap a bucket group's `reset`: set its count of reductions to 0."""
    original(self)
    setattr(self, REDUCTIONS, 0)


def start_param_sync(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap a bucket group's `start_param_sync`: record that all ranks get the latest parameters."""
    original(self, *args, **kwargs)
    setattr(self, GATHERED, True)


def reproduce() -> None:
    """Step on gradients that were never reduced over ranks; on stock Megatron nothing raises."""
    model = bench(overlap_grad_reduce=False, distributed_optimizer=False, wire=False)
    model.forward_backward(1, data_seed=0)
    try:
        model.step()
    except RuntimeError as error:
        if type(error).__name__ == "ReplicaMismatchError":
            return
        raise
    raise Fault("a step on gradients that differ between ranks went unnoticed")


def control() -> object:
    """Run steps on reduced gradients, and one step on gradients of zero, as a control.
    Return the parameters' bytes, and the results of the last step.
    """
    from . import _controls

    model = _controls.build(overlap=True, distributed=False)
    model.chunks[0].zero_grad_buffer()
    return [*_controls.run_all(), tuple(map(str, model.step()))]


PATCH = Patch(
    "nothing notices that data-parallel ranks step on different gradients (debug mode)",
    target("optimizer.get_megatron_optimizer", build, "model_chunks"),
    *step_targets(step),
    target("group.start_grad_sync", start_grad_sync),
    target("group.reset", reset),
    target("group.start_param_sync", start_param_sync),
    default=False,
    debug=True,
)
