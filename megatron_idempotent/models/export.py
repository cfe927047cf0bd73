"""A Megatron model's weights under Hugging Face names, whole, on rank 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_idempotent.fp8.blockwise import BLOCK, E4M3
from megatron_idempotent.fp8.export import Fp8Export
from megatron_idempotent.weights.records import TensorInfo

from .buckets import BucketStream
from .chunks import placed_slots, sync
from .families import Architecture
from .naming import hf_shapes
from .plan import make_plan
from .shipping import Shipping


class MegatronWeights:
    """A `WeightSource` of the chunks of all ranks, in any layout of tensor, pipeline, virtual
    pipeline, expert and data parallel ranks.

    What each rank has is gathered once, when this is made; then every part of a tensor goes to
    rank 0 from the lowest rank that has it, in one message. Tied embeddings go once, as the
    embedding; rows that pad the vocabulary do not.

    Parameters are read while a bucket is made: change none between the first bucket and the last.
    Iterating again reads them again.

    Rank 0 holds a bucket and at most the largest tensor beside it, besides those that its caller
    keeps; others hold at most the largest of their shards.

    Example:
        source = MegatronWeights(chunks, Architecture.read(directory), dtype=torch.bfloat16)
        with source.buckets(bucket_bytes=1 << 30) as buckets:
            for bucket in buckets:
                ...
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        arch: Architecture,
        *,
        dtype: torch.dtype | None = None,
        fp8: Fp8Export | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """A collective of all ranks of the group.

        Args:
            chunks: this rank's chunks, bare or in DDP and Float16Module; of DDP's, pending gathers
                are finished whenever an iteration starts.
            arch: what they compute; the same on all ranks.
            dtype: what weights are cast to before they are sent; None for that of the parameters.
            fp8: quantizes matrices, on rank 0, once they are whole. A ValueError of it, as for
                values that are not finite, is raised there only.
            group: ranks that have the whole model between them, the first of which is rank 0 here;
                None for the default group. So every replica may have an engine of its own.

        Raises:
            CheckpointMismatch: chunks that are not of that architecture, or not all of it.
            FailedElsewhere: the same on other ranks.
            ValueError: a dtype that is not of floating point.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"MegatronWeights() got dtype={dtype}: weights are floating point")
        self._chunks, self._fp8 = list(chunks), fp8
        placed, error = None, None
        try:
            placed = placed_slots(self._chunks, arch)
        except (ValueError, RuntimeError) as bad:
            error = bad
        plan = make_plan(hf_shapes(arch), placed, error, group=group)
        infos = plan.infos
        if dtype is not None:
            infos = tuple(dataclasses.replace(info, dtype=dtype) for info in infos)
        self._outputs = [_outputs(info, fp8) for info in infos]
        device = placed[0].parameter.device if placed else torch.device("cpu")
        self._fetch = Shipping(plan, infos, device, group)

    def tensors(self) -> tuple[TensorInfo, ...]:
        """All tensors in the order in which they go; moves no data."""
        return tuple(info for infos in self._outputs for info in infos)

    def buckets(self, *, bucket_bytes: int) -> BucketStream:
        """The weights as they are now. All ranks call it, and take all buckets or close the stream.

        Errors: `ValueError` for a size that is no positive int.
        """
        sync(self._chunks)
        return BucketStream(
            self._outputs,
            self._fetch,
            bucket_bytes=bucket_bytes,
            convert=None if self._fp8 is None else self._fp8.weights,
            keeps=self._fetch.keeps,
        )

    def quantization_config(self) -> dict[str, Any] | None:
        """Returns config.json's entry for quantized weights; None if they are not."""
        if self._fp8 is None:
            return None
        metas = [
            (info.name, torch.empty(info.shape, dtype=info.dtype, device="meta"))
            for info in self.tensors()
        ]
        return self._fp8.quantization_config(
            (name, meta.to(torch.bfloat16) if meta.dtype == E4M3 else meta)
            for name, meta in metas
            if not name.endswith("_scale_inv")
        )


def _outputs(info: TensorInfo, fp8: Fp8Export | None) -> tuple[TensorInfo, ...]:
    """Returns the tensors that are made of one."""
    if fp8 is None or not fp8.converts(info.name, torch.empty(info.shape, device="meta")):
        return (info,)
    *lead, rows, columns = info.shape
    scales = (*lead, -(-rows // BLOCK), -(-columns // BLOCK))
    return (
        dataclasses.replace(info, dtype=E4M3),
        TensorInfo(name=f"{info.name}_scale_inv", shape=scales, dtype=torch.float32),
    )
