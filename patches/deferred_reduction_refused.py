"""`finish_grad_sync()` asserts on gradients that were all accumulated inside of `no_sync()`.

Symptom:
    `AssertionError: Communication call has not been issued for this bucket (0/5 params have grad
    available)` from `finish_grad_sync()` or `finalize_model_grads` after windows inside of
    `no_sync()`, with overlap_grad_reduce: in every window before 0.16, in every window but the
    first from 0.16 on. With num_distributed_optimizer_instances above one there is no assertion,
    and the gradients stay unreduced.

Cause:
    Reductions are dispatched by the hooks of a backward pass outside of `no_sync()`.
    `finish_grad_sync` waits for these reductions, but dispatches none itself, except in the first
    batch of 0.16 and later.

Affects:
    Every release. What the patch does: if `no_sync()` was entered in this window, and no bucket
    group of the chunk has registered a gradient or reduced, `finish_grad_sync` dispatches all
    reductions, in its own order. If only some groups have, upstream's assertion remains: ranks may
    have dispatched different reductions, and collectives would pair up wrongly.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/param_and_grad_buffer.py,
    `_ParamAndGradBucketGroup.finish_grad_sync`.

Remove when:
    `finish_grad_sync` dispatches the reductions that `no_sync()` held back.
    `upstream/deferred-reduction-refused` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import ddp

from ._case import Fault, Original, Patch, backward, bench, target

_HELD = "_megatron_idempotent_held"


def finish_grad_sync(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap `finish_grad_sync`: first dispatch the chunk's reductions that `no_sync` prevented."""
    if (
        self.ddp_config.overlap_grad_reduce
        and getattr(self, _HELD, False)
        and not ddp.is_idle(self)
        and not any(ddp.dispatched(g) or ddp.registered(g) for g in ddp.bucket_groups(self))
    ):
        ddp.start_held(self, *args, **kwargs)
    original(self, *args, **kwargs)
    setattr(self, _HELD, False)
    ddp.finished(self)


def no_sync(original: Original, self: Any) -> Any:
    """Wrap DDP's `no_sync`: record on the chunk that its reductions are postponed."""
    setattr(self, _HELD, True)
    return original(self)


def zero_grad_buffer(original: Original, self: Any) -> None:
    """Wrap `zero_grad_buffer`: also clear the chunk's records of postponed and past reductions."""
    original(self)
    setattr(self, _HELD, False)
    ddp.began(self)


def reproduce() -> None:
    """Run a first window, then two backwards inside of `no_sync()`, then `finish_grad_sync()`.
    On stock Megatron the last call asserts with overlap_grad_reduce.
    """
    gradients = []
    for overlap in (True, False):
        model = bench(
            overlap_grad_reduce=overlap, distributed_optimizer=False, with_optimizer=False
        )
        (chunk,) = model.chunks
        model.forward_backward(2, data_seed=0)
        chunk.zero_grad_buffer()
        with chunk.no_sync():
            backward(model, data_seed=1)
            backward(model, data_seed=2)
        chunk.finish_grad_sync()
        gradients.append(model.gradients())
    if not gradients[0].equal(gradients[1]):
        raise Fault("gradients that no_sync() held back are not reduced")


PATCH = Patch(
    "finish_grad_sync() asserts on gradients that were accumulated inside of no_sync()",
    target("ddp.finish_grad_sync", finish_grad_sync),
    target("ddp.no_sync", no_sync),
    target("ddp.zero_grad_buffer", zero_grad_buffer),
    target("group.start_grad_sync", ddp.dispatching),
    groups=("overlap",),
    stock_error=r"AssertionError: Communication call has not been issued",
)
