"""One module wrapped by DDP twice fails in its first backward pass.

Symptom:
    `AssertionError: param.grad being None is not safe when overlap_grad_reduce is True` from the
    first backward pass, if a second `DistributedDataParallel` was built around a module that is
    already wrapped, for example to change its options. Without overlap_grad_reduce the second
    wrapper's gradients are right.

Cause:
    Each wrapper registers a hook per parameter. The hooks of the first wrapper take the gradient
    and clear it, so those of the second find none. The hooks refer to the first wrapper, so that it
    is not freed when the program deletes it.

Affects:
    Every release. There is no patch, because hooks of gradient accumulators cannot be removed from
    outside. Build the module again for the second wrapper, and load its state.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/distributed_data_parallel.py,
    `_make_backward_post_hook`.

Remove when:
    DDP keeps the handles of its backward hooks, and can be removed from a module.
"""

from __future__ import annotations

from ._case import Limit, bench


def reproduce() -> None:
    """Wrap a module in DDP that is already in another DDP, and run one window.
    With overlap_grad_reduce the first backward asserts.
    """
    from megatron.core.distributed import DistributedDataParallel

    model = bench(with_optimizer=False)
    (first,) = model.chunks
    model.chunks = [DistributedDataParallel(model.config, first.ddp_config, first.module)]
    model.config.no_sync_func = model.chunks[0].no_sync
    model.forward_backward(1, data_seed=0)


LIMIT = Limit(
    summary="a module that DDP wrapped twice fails in its first backward pass, with overlap",
    stock_error=r"AssertionError: param\.grad being None is not safe",
)
