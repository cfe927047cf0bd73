"""Gradients are divided by the loss scale at every `prepare_grads()` of the optimizer.

Symptom:
    With a loss scale, a second `optimizer.step()` on the same gradients, or `prepare_grads()` for
    logging before the step, uses gradients that are too small by the loss scale: a gradient norm of
    0.001 instead of 1.4, clipping that never clips, fp16 main gradients that flush to zero. A
    dynamic loss scale counts the window twice, and may have changed in between. No error.

Cause:
    `prepare_grads` unscales in place, and the main gradients are views of the gradient buffer if
    that is fp32. The optimizer does not remember that it has unscaled them. If they are copies, the
    second copy is divided by the loss scale from after the first call.

Affects:
    Every release, for optimizers with a gradient scaler. What the patch does: it remembers the
    version counters of the gradient buffers, which zeroing, accumulating and reducing raise. While
    these do not change, except by clipping, a further `prepare_grads` unscales only gradients that
    are copied again, by the scale of the first call, returns that call's result for inf and nan,
    and leaves the loss scale alone. It joins the same collective as upstream's. The patch does not
    notice a gradient that is replaced through `main_grad.data`.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/optimizer.py,
    `MixedPrecisionOptimizer.prepare_grads`.

Remove when:
    `prepare_grads` may be called twice on the same gradients.
    `upstream/unscaled-twice` has the repair, for calls before the step.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import optimizers

from ._case import Fault, Original, Patch, address, bench, target

_MEMORY = "megatron_idempotent_unscaled"
#: What ranks with unscaled gradients add to the flag for inf that they reduce. A rank without
#: trainable parameters has no gradient that would show it a new window, and learns of it so.
_REPEATED = 0.5


def prepare_grads(original: Original, self: Any) -> Any:
    """Wrap `prepare_grads`: divide each gradient by the loss scale only once."""
    if self.grad_scaler is None or optimizers.in_fsdp(self):  # Megatron-FSDP has its own gradients
        return original(self)
    if _is_unscaled(self):
        _, scale, found_inf = getattr(self, _MEMORY)
        return _unscale_copies(self, scale=scale, found_inf=found_inf)
    # The call below replaces the scaler's tensors, and does not write to them.
    scale, scaler = self.grad_scaler.scale, dict(vars(self.grad_scaler))
    found_inf = original(self)
    reduced = float(self.found_inf)
    if reduced % 1:  # the others had unscaled theirs before, and left their loss scale alone
        vars(self.grad_scaler).update(scaler)
        found_inf = reduced > 1
    setattr(self, _MEMORY, (_versions(self), scale, found_inf))
    return found_inf


def clip_grad_norm(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the clipping of gradients: if they were unscaled before, record that they still are.
    The loss scale then is not divided out a second time.
    """
    unscaled = [o for o in getattr(self, "chained_optimizers", (self,)) if _is_unscaled(o)]
    result = original(self, *args, **kwargs)
    for optimizer in unscaled:
        _remember(optimizer)
    return result


def step_with_ready_grads(original: Original, self: Any) -> Any:
    """Wrap the update: record that the gradients are unscaled in the state that they have now.
    The caller may have clipped them after `prepare_grads`.
    """
    if hasattr(self, _MEMORY):
        _remember(self)
    return original(self)


def _is_unscaled(optimizer: Any) -> bool:
    memory = getattr(optimizer, _MEMORY, None)
    return memory is not None and memory[0] != () and memory[0] == _versions(optimizer)


def _remember(optimizer: Any) -> None:
    _, scale, found_inf = getattr(optimizer, _MEMORY)
    setattr(optimizer, _MEMORY, (_versions(optimizer), scale, found_inf))


def _unscale_copies(optimizer: Any, *, scale: Any, found_inf: bool) -> bool:
    import torch

    with torch.no_grad():
        optimizer._copy_model_grads_to_main_grads()
        sources = {_memory(grad) for grad in _model_grads(optimizer)}
        copies = [
            grad
            for grad in optimizer._collect_main_grad_data_for_unscaling()
            if _memory(grad) not in sources
        ]
        optimizer.found_inf.fill_(float(found_inf))
        if copies:
            torch._amp_foreach_non_finite_check_and_unscale_(
                copies, optimizer.found_inf, scale.double().reciprocal().float()
            )
        optimizer.found_inf.add_(_REPEATED)
        # All ranks must enter: a rank without parameters runs upstream's body, which also reduces.
        torch.distributed.all_reduce(
            optimizer.found_inf,
            op=torch.distributed.ReduceOp.MAX,
            group=optimizer.get_grad_stats_parallel_group(),
        )
        return bool(optimizer.found_inf.item() > _REPEATED)


def _versions(optimizer: Any) -> tuple[int, ...]:
    """Return torch's version counters of an optimizer's gradients or of their buffers, none without
    trainable parameters. Each in-place write raises a counter.
    """
    if optimizer.is_stub_optimizer:
        return ()
    if hasattr(optimizer, "buffers"):
        return tuple(buffer.grad_data._version for buffer in optimizer.buffers)
    return tuple(grad._version for grad in _model_grads(optimizer))


def _model_grads(optimizer: Any) -> list[Any]:
    names = (
        ("model_float16_groups", "model_fp32_groups")
        if hasattr(optimizer, "buffers")
        else ("float16_groups", "fp32_from_fp32_groups")
    )
    params = [p for name in names for group in getattr(optimizer, name) for p in group]
    grads = [getattr(p, "main_grad", p.grad) for p in params]
    return [grad for grad in grads if grad is not None]


def _memory(tensor: Any) -> Any:
    return tensor.untyped_storage().data_ptr()


def reproduce() -> None:
    """Compare a window's gradient norm with and without `prepare_grads()` before the step.
    On stock Megatron the norm with it is divided by the loss scale twice.
    """
    norms = []
    for extra_calls in (0, 1):
        model = bench(dtype="bf16", loss_scale=1024.0)
        model.forward_backward(2, data_seed=0)
        for _ in range(extra_calls):
            model.optimizer.prepare_grads()
        _, norm, _ = model.step()
        norms.append(float(norm))
    if norms[0] != norms[1]:
        raise Fault(f"gradient norm {norms[1]} after prepare_grads(), {norms[0]} without")


PATCH = Patch(
    "a second step() or prepare_grads() divides the same gradients by the loss scale again",
    target("mixed.prepare_grads", prepare_grads),
    target("any.clip_grad_norm", clip_grad_norm),
    target("mixed.step_with_ready_grads", step_with_ready_grads),
    fixed_by=((address("mixed.prepare_grads"), "self.grads_unscaled"),),
    groups=("loss-scale",),
)
