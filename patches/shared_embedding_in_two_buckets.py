"""A tied embedding begins in the padding of the bucket before it, and the optimizer refuses it.

Symptom:
    With a tied embedding, several pipeline stages and the distributed optimizer, building the
    optimizer raises `Param should not be in param_gbuf_map; each param only belongs to a single
    bucket.` on some ranks, and the others wait. It depends on sizes: those of all parameters before
    the embedding in the buffer, each rounded up to 64, must not add up to a multiple of 128.

Cause:
    The embedding gets a bucket of its own. The end of a bucket is padded to a multiple of the
    data-parallel size and of 128, but the embedding's start is padded only if it is no multiple of
    the data-parallel size. So it begins in the padding of the bucket before it.

Affects:
    0.12. What the patch does: the start is padded as the end is, as from 0.13 on.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.13.0/megatron/core/distributed/param_and_grad_buffer.py,
    where the new bucket begins at the padded end of the one before it.
    https://github.com/NVIDIA/Megatron-LM/issues/835 meets it: "The problems with bucket and
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
    """Stands for the data-parallel size: a place is a multiple of it where no bucket is padded."""

    def __rmod__(self, place: int) -> int:
        return place % math.lcm(int(self), 128)


def init(original: Original, self: Any, ddp_config: Any, *args: Any, **kw: Any) -> None:
    """Lays out a buffer in which a bucket begins at the padded end of the one before it."""
    if not ddp_config.use_distributed_optimizer:
        original(self, ddp_config, *args, **kw)
        return
    import torch

    theirs = torch.distributed.get_world_size
    torch.distributed.get_world_size = lambda *of, **group: _Divisor(theirs(*of, **group))
    try:
        original(self, ddp_config, *args, **kw)
    finally:
        torch.distributed.get_world_size = theirs
    self.data_parallel_world_size = int(self.data_parallel_world_size)


def reproduce() -> None:
    """Build a tied model, of which a layer has seven sizes that are odd multiples of 64."""
    bench(pp=2, tied=True, layers_per_stage=1, overlap_grad_reduce=False)


PATCH = Patch(
    "a tied embedding begins in the padding of another bucket, and the set-up raises",
    target("buffer.__init__", init, _ASKED),
    before="0.13",
    fixed_when=no_body_has(_ASKED),
    stock_error="AssertionError: Param should not be in param_gbuf_map",
)
