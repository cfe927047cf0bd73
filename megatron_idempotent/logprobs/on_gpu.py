"""What `kernels` computes, by Triton's kernels: rows are read once, and written once.

Only this file launches them, and it is imported only where they are used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .asked import Columns, Wanted
from .combine import Partial, merged
from .rows import panels
from .slopes import Slopes
from .triton_blocks import block_of
from .triton_gradient import launch_gradient
from .triton_statistics import launch_statistics


def partial_of(
    logits: Tensor,
    local_N: Tensor,
    kept_N: Tensor | None,
    temperature: Tensor | float,
    columns: Columns,
    wanted: Wanted,
) -> Partial:
    """Statistics of the kept tokens, without a copy of their rows."""
    matrices = panels(logits)[0]
    block = block_of("statistics", logits.dtype)
    temperature = _computed(temperature)
    found: list[Tensor] = []
    done = 0
    sizes = [len(matrix) for matrix in matrices]
    masks = [None] * len(sizes) if kept_N is None else torch.split(kept_N, sizes)
    for matrix, mask in zip(matrices, masks, strict=True):
        row_n = None if mask is None else mask.nonzero().squeeze(1)
        tokens = slice(done, done + (len(matrix) if row_n is None else len(row_n)))
        done = tokens.stop
        if tokens.start == tokens.stop:
            continue
        of_these = temperature[tokens] if isinstance(temperature, Tensor) else temperature
        here = local_N[tokens]
        arguments = (matrix, row_n, here, of_these, columns.real, wanted.entropy, block)
        found.append(launch_statistics(*arguments))
    parts_PN4 = found[0] if len(found) == 1 else torch.cat(found, 1)
    width = block.shape.segment
    own = [local_N.div(width, rounding_mode="floor") == part for part in range(len(parts_PN4))]
    return merged([Partial(*part.unbind(-1)) for part in parts_PN4], own, temperature)


def write_gradient(
    rows: list[Tensor],
    into: list[Tensor],
    kept_N: Tensor | None,
    live_N: Tensor | None,
    slopes: Slopes,
    temperature: Tensor | float,
    columns: Columns,
) -> None:
    """Write all of `into`: zeros where tokens are not kept or not live, and in padded columns.

    `live_N` says it of the kept tokens, `slopes` and `temperature` are of all kept tokens.
    """
    token_M = None
    if live_N is not None:
        token_M = torch.where(live_N, torch.arange(len(live_N), device=live_N.device), -1)
    if kept_N is not None:
        place_M = kept_N.cumsum(0) - 1
        if token_M is not None and len(token_M):
            place_M = token_M[place_M.clamp(min=0)]
        token_M = torch.where(kept_N, place_M, -1)
    temperature = _computed(temperature)
    done = 0
    for matrix, into_matrix in zip(rows, into, strict=True):
        if not into_matrix.numel():
            continue
        here = slice(done, done + len(matrix))
        done = here.stop
        of_these = None if token_M is None else token_M[here]
        some = slopes if token_M is not None or len(rows) == 1 else slopes.of(here)
        t = temperature
        if isinstance(t, Tensor) and some is not slopes:
            t = t[here]
        block = block_of("gradient", matrix.dtype)
        launch_gradient(matrix, into_matrix, of_these, some, t, columns.real, block)


def _computed(temperature: Tensor | float) -> Tensor | float:
    """As the kernels take it: of float32, one after the other."""
    if isinstance(temperature, Tensor):
        return temperature.to(torch.float32).contiguous()
    return temperature
