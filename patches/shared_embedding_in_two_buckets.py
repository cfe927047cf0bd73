"""A tied embedding begins in the padding of the bucket before it, and the optimizer raises.

Symptom:
    With a tied embedding, several pipeline stages and the distributed optimizer, building the
    optimizer raises `Param should not be in param_gbuf_map; each param only belongs to a single
    bucket.` on some ranks, and the others wait. It depends on sizes: it happens if the sizes of all
    parameters before the embedding in the buffer, each rounded up to 64, do not add up to a
    multiple of 128.

Cause:
    The embedding gets its own bucket. The end of a bucket is padded to a multiple of the
    data-parallel size and of 128, but the embedding's start is padded only if it is not a multiple
    of the data-parallel size. So it begins in the padding of the bucket before it.

Affects:
    0.12. What the patch does: the start is padded like the end, as from 0.13 on.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.13.0/megatron/core/distributed/param_and_grad_buffer.py,
    where the new bucket begins at the padded end of the one before it.
    https://github.com/NVIDIA/Megatron-LM/issues/835 reports it: "The problems with bucket and
    shared_embedding."

Remove when:
    0.12 is no longer supported.
"""

from __future__ import annotations

import math
from typing import Any

from ._case import Original, Patch, bench, no_body_has, target

_ASKED = "param_start_index % self.data_parallel_world_size != 0"


class _Divisor(int):
    """Stands in for the data-parallel size, so that upstream pads buckets to multiples of 128."""

    def __rmod__(self, start: int) -> int:
        return start % math.lcm(int(self), 128)


def init(original: Original, self: Any, ddp_config: Any, *args: Any, **kw: Any) -> None:
    """Wrap a buffer's constructor: each bucket begins at the padded end of the bucket before it."""
    if not ddp_config.use_distributed_optimizer:
        original(self, ddp_config, *args, **kw)
        return
    import torch

    world_size = torch.distributed.get_world_size
    torch.distributed.get_world_size = lambda *a, **group: _Divisor(world_size(*a, **group))
    try:
        original(self, ddp_config, *args, **kw)
    finally:
        torch.distributed.get_world_size = world_size
    self.data_parallel_world_size = int(self.data_parallel_world_size)


def reproduce() -> None:
    """Build a tied two-stage model whose layers have odd multiples of 64 elements.
    On stock Megatron the optimizer's set-up asserts.
    """
    bench(pp=2, tied=True, layers_per_stage=1, overlap_grad_reduce=False)


PATCH = Patch(
    "a tied embedding begins in the padding of another bucket, and the set-up raises",
    target("buffer.__init__", init, _ASKED),
    before="0.13",
    fixed_when=no_body_has(_ASKED),
    stock_error="AssertionError: Param should not be in param_gbuf_map",
)
