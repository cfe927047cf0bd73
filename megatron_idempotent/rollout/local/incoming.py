"""An update on its way in: `Staging`, and matrices in FP8 beside those in the model's own type."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch

from megatron_idempotent.fp8.blockwise import BLOCK, E4M3, dequantize_blockwise
from megatron_idempotent.weights import Bucket, Staging, TensorInfo, UpdateDamaged, WeightUpdate
from megatron_idempotent.weights.side_stream import SideStream

_SCALE = "_scale_inv"


class Incoming(Staging):
    """Gathers tensors, each either as the model has it or as `Fp8Export` makes it.

    A matrix in E4M3 needs its scales, float32, as `name` + `_scale_inv`, in its own bucket or a
    later one.
    """

    def __init__(
        self, update: WeightUpdate, *, expected: Iterable[TensorInfo], device: torch.device
    ) -> None:
        """
        Args:
            update: what is being staged.
            expected: every tensor of the model, by the names that the update has.
            device: where tensors are kept.
        """
        expected = tuple(expected)
        super().__init__(update, expected=expected)
        self._dtypes = {info.name: info.dtype for info in expected}
        self._device = device
        self.side = SideStream(device)
        """The CUDA stream for copies, so that they do not wait for what the model computes."""

    def add(self, bucket: Bucket) -> None:
        """Check a copy of the bucket and keep it: its sender may free or change what it sent.

        Errors: those of `Staging.add`.
        """
        with self.side.complete():
            copies = {
                name: tensor.detach().to(self._device, copy=True).contiguous()
                for name, tensor in bucket.tensors.items()
            }
            super().add(dataclasses.replace(bucket, tensors=copies))

    def complete(self) -> Mapping[str, torch.Tensor]:
        """All tensors in the model's own types. Errors: those of `Staging.complete`."""
        came = super().complete()
        whole = {}
        for name, tensor in came.items():
            if tensor.dtype == E4M3 and name in self._dtypes:
                if name + _SCALE not in came:
                    raise UpdateDamaged(
                        f"update {self.update.id}: {name} came in {E4M3} without {name}{_SCALE}; "
                        "send both"
                    )
                whole[name] = dequantize_blockwise(
                    tensor, came[name + _SCALE], dtype=self._dtypes[name]
                )
            elif name in self._dtypes:
                whole[name] = tensor
        return whole

    def _check_fit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            info = self._expected.get(name)
            if tensor.dtype != E4M3 or info is None or len(info.shape) != 2:
                continue
            self._expected[name] = dataclasses.replace(info, dtype=E4M3)
            blocks = tuple(-(-size // BLOCK) for size in info.shape)
            scales = TensorInfo(name=name + _SCALE, shape=blocks, dtype=torch.float32)
            self._expected[scales.name] = scales
        super()._check_fit(tensors)
