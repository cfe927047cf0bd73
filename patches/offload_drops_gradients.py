"""Offloading the gradient buffers between backward and step zeroes the gradients.

Symptom:
    `optimizer.step()` reports success with a gradient norm of 0 and moves the parameters by
    momentum alone, if `offload_grad_buffers()` and `restore_grad_buffers()` ran since the backward,
    for a generation or an evaluation between the window and its step. No error. The same happens
    with a buffer's own `offload_to_cpu()` and `reload_from_cpu()`, which NeMo-RL's workers call: a
    step in several pieces keeps only the gradients after the last offload.

Cause:
    Upstream frees the buffers and allocates zeroed ones later. It checks neither whether the
    gradients are still needed, nor whether a reduction into the buffers is in flight.

Affects:
    0.16.0 and later. What the patch does: a step raises a RuntimeError if an offload has dropped
    gradients that it would have used, and `zero_grad_buffer()` has not been called since. Dropping
    gradients that no step will use (of an aborted window, of a warm-up, of an optimizer that is not
    Megatron's) is allowed as before; so is an offload after a step, even a skipped one, at the cost
    of one comparison. `offload_grad_buffers` itself raises if a reduction into the memory that it
    would free is in flight. A program that drops gradients on purpose, skips `zero_grad_buffer()`
    and steps on the next window looks like one that accumulates over both windows: its step raises.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/distributed_data_parallel.py,
    `offload_grad_buffers`. https://github.com/NVIDIA/Megatron-LM/pull/7383, "preserve accumulated
    gradients across buffer offload", was closed; https://github.com/NVIDIA-NeMo/RL/pull/3660 keeps
    the buffers in place between the pieces of a step.

Remove when:
    the gradients survive, or upstream raises. By design: upstream documents that
    `restore_grad_buffers()` zeroes the gradients.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron.ddp import bucket_groups

from ._case import Fault, Original, Patch, bench, target

_USED = "megatron_idempotent_used_version"
_DROPPED = "megatron_idempotent_dropped"
_OWNERS = "megatron_idempotent_gradient_owners"


def offload(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap `offload_grad_buffers`: record the gradients that it drops before a step has used them.
    Raise if a gradient reduction is in flight.
    """
    in_flight = sum(group.grad_reduce_handle is not None for group in bucket_groups(self))
    if in_flight:
        raise RuntimeError(
            f"offload_grad_buffers() found {in_flight} gradient reductions in flight into the "
            "memory that it would free: finish the window first (finish_grad_sync, or "
            "finalize_model_grads)"
        )
    buffers = [*self.buffers, *self.expert_parallel_buffers]
    pending = [buffer for buffer in buffers if _pending(buffer.grad_data)]
    original(self, *args, **kwargs)
    for buffer in pending:
        setattr(_owner(buffer.grad_data), _DROPPED, True)


def offload_buffer(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap a buffer's `offload_to_cpu`: record if it drops gradients that no step has used."""
    grads = self.grad_data
    pending = grads is not None and _pending(grads)
    original(self, *args, **kwargs)
    if pending and not grads.untyped_storage().size():
        setattr(_owner(grads), _DROPPED, True)


def reset(original: Original, self: Any) -> None:
    """Zero a buffer's gradients, and clear the record that they were dropped."""
    original(self)
    vars(_owner(self.grad_data)).pop(_DROPPED, None)


def step(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap an optimizer step: raise if an offload dropped its gradients before a step used them.
    Otherwise run the step, and record that it has used the gradients.
    """
    grads = [
        grad
        for optimizer in getattr(self, "chained_optimizers", (self,))
        for grad in _gradients(optimizer)
    ]
    dropped = sum(_DROPPED in vars(grad) for grad in grads)
    if dropped:
        raise RuntimeError(
            f"optimizer.step() needs gradients that an offload of their buffer has dropped, in "
            f"{dropped} of {len(grads)} buffers: no step had used them by then. Step before the "
            "buffers are offloaded; to do without these gradients, call zero_grad_buffer() and run "
            "the window again"
        )
    result = original(self, *args, **kwargs)
    for grad in grads:
        # The counter rises with every write through any view, except by custom kernels; zeroing
        # before the next window always raises it.
        setattr(grad, _USED, grad._version)
    return result


def _pending(grad_data: Any) -> bool:
    if not grad_data.untyped_storage().size():  # offloaded already
        return False
    owner = _owner(grad_data)
    return getattr(owner, _USED, None) != owner._version and bool(grad_data.any())


def _gradients(optimizer: Any) -> list[Any]:
    """Return the tensors that own the memory of an optimizer's gradients, such as DDP's buffers."""
    if hasattr(optimizer, "buffers"):
        return [_owner(buffer.grad_data) for buffer in optimizer.buffers]
    if hasattr(optimizer, "float16_groups"):
        groups = [*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups]
    else:
        groups = [group["params"] for group in optimizer.param_groups]
    # Computed once, and again if the model was wrapped by DDP again.
    first = next((getattr(param, "main_grad", None) for group in groups for param in group), None)
    cached: tuple[Any, list[Any]] = getattr(optimizer, _OWNERS, (None, []))
    if first is not cached[0]:
        grads = [getattr(param, "main_grad", None) for group in groups for param in group]
        owners = {id(owner): owner for owner in (_owner(g) for g in grads if g is not None)}
        cached = (first, list(owners.values()))
        setattr(optimizer, _OWNERS, cached)
    return cached[1]


def _owner(tensor: Any) -> Any:
    return tensor if tensor._base is None else tensor._base


def reproduce() -> None:
    """Run a window, offload and restore its gradient buffers, and step.
    On stock Megatron the step succeeds with a gradient norm of 0; with the patch it raises.
    """
    model = bench()
    for way in (_offloaded, _offloaded_one_by_one):
        model.forward_backward(2, data_seed=0)
        for chunk in model.chunks:
            way(chunk)
        try:
            _, norm, _ = model.step()
        except RuntimeError as refusal:
            if "has dropped" in str(refusal):
                continue
            raise
        if float(norm) == 0.0:
            raise Fault("the step's gradient norm is 0 after an offload of the buffers")


def control() -> object:
    """Offload gradient buffers where no step needs the gradients any more, as a control.
    That is after steps (one is skipped for an overflow), after zeroing, and after windows without a
    step. Return the parameters' bytes.
    """
    bits = []
    for overlap in (True, False):
        model = bench(
            dtype="fp16",
            overlap_grad_reduce=overlap,
            distributed_optimizer=overlap,
            optimizer_overrides={"initial_loss_scale": 2.0**8},
        )
        (chunk,) = model.chunks
        _offloaded(chunk)
        for data_seed in range(3):
            model.forward_backward(data_seed + 1, data_seed=data_seed)  # no step uses it
            _offloaded(chunk)
            if data_seed == 1:  # an overflow
                model.on_microbatch = lambda _, loss: None if loss is None else loss * float("inf")
            model.forward_backward(2, data_seed=data_seed)
            model.on_microbatch = None
            success, _, _ = model.step()
            if success != (data_seed != 1):
                raise Fault(f"step {data_seed} returned {success}")
            _offloaded(chunk)
            _offloaded_one_by_one(chunk)
        bits.append(model.bits())
    return bits


def _offloaded(chunk: Any) -> None:
    chunk.offload_grad_buffers()
    chunk.restore_grad_buffers()


def _offloaded_one_by_one(chunk: Any) -> None:
    for buffer in chunk.buffers:
        buffer.offload_to_cpu(move_params=False)
        buffer.reload_from_cpu(move_params=False)


PATCH = Patch(
    "offload_grad_buffers() between backward and step zeroes the gradients silently",
    target("ddp.offload_grad_buffers", offload),
    target("buffer.offload_to_cpu", offload_buffer),
    target("buffer.reset", reset),
    target("chained.step", step),
    target("mixed.step_with_ready_grads", step),
    target("fp32.step_with_ready_grads", step),
    since="0.16",
    groups=("offload",),
)
