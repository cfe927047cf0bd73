"""Choose what computes log-probs: eager torch, `torch.compile`, or Triton's kernels."""

from __future__ import annotations

from typing import Literal

import torch

from megatron_idempotent.kernel_choice import uses_triton

Backend = Literal["eager", "compiled", "triton"]

#: With bfloat16, and maxima that keep NaN.
_CAPABILITY = (8, 0)
#: Kernels compute in float32; float64 is for who wants more, and computed by torch.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def backend_of(
    device: torch.device, dtype: torch.dtype, *, compiled: bool, triton: bool | None
) -> Backend:
    """Choose for logits of this type on this device.

    Raises:
        ValueError: kernels were asked for where they cannot run, or beside `compiled`.
    """
    if compiled and triton:
        raise ValueError("token_logprobs() got compiled=True and triton=True: one of them")
    if compiled:
        return "compiled"
    found = uses_triton("token_logprobs()", device, asked=triton, capability=_CAPABILITY)
    return "triton" if found and dtype in DTYPES else "eager"
