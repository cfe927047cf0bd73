"""Does with Triton's kernels what `kernels` does with torch; reads rows once, writes them once.

Only this file launches them, and it is imported only where they are used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import GradCoefficients
from .request import Columns, ComputeOptions, TokenBatch
from .rows import as_matrices, kept_places
from .statistics import Partial, Whole, all_gathered
from .triton_kernels import block_of, launch_gradient, launch_statistics
from .triton_tokens import launch_coefficients, launch_combine


def local_statistics(
    logits: Tensor,
    local_N: Tensor,
    kept_N: Tensor | None,
    temperature: Tensor | float,
    columns: Columns,
    wanted: ComputeOptions,
) -> Partial:
    """Compute statistics of the kept tokens, without a copy of their rows."""
    matrices = as_matrices(logits)[0]
    block = block_of("statistics", logits.dtype)
    temperature = _computed(temperature)
    found: list[Tensor] = []
    done = 0
    sizes = [len(matrix) for matrix in matrices]
    masks = [None] * len(sizes) if kept_N is None else torch.split(kept_N, sizes)
    for matrix, mask in zip(matrices, masks, strict=True):
        if mask is None:
            row_n = None
        elif len(sizes) == 1:
            row_n = kept_places(mask, len(local_N))
        else:
            row_n = mask.nonzero().squeeze(1)
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
    if len(parts_PN4) == 1:
        return Partial(*parts_PN4[0].unbind(-1))
    return Partial(*launch_combine(parts_PN4, local_N, width, temperature, whole=False).unbind(-1))


def global_statistics(partial: Partial, asked: TokenBatch) -> Whole:
    """Do the same as `statistics.combine`: the group's ranks take part in one all-gather."""
    columns, temperature = asked.columns, _computed(asked.temperature)
    parts_RN4 = all_gathered(torch.stack(partial, dim=-1), columns.group)
    found = launch_combine(parts_RN4, asked.targets, columns.per_rank, temperature, whole=True)
    return Whole(*found)


def grad_coefficients(
    asked: TokenBatch, whole: Whole, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None
) -> tuple[GradCoefficients, Tensor]:
    """Return what `GradCoefficients.from_outputs` does, and each token's index, [N].

    The index is -1 if the token's outputs have no gradient. The host reads nothing.
    """
    temperature = _computed(asked.temperature)
    found_3N, token_N = launch_coefficients(whole, of_logprob_N, of_entropy_N, temperature)
    factor_N, slope_N, of_target_N = found_3N
    slope = None if of_entropy_N is None else slope_N
    return GradCoefficients(asked.local, whole.origin, factor_N, slope, of_target_N), token_N


def write_gradient(
    rows: list[Tensor],
    into: list[Tensor],
    kept_N: Tensor | None,
    token_N: Tensor | None,
    slopes: GradCoefficients,
    temperature: Tensor | float,
    columns: Columns,
) -> None:
    """Write all of `into`: gradients, and zeros for tokens not kept and in padded columns.

    `slopes` and `temperature` are of all kept tokens. Those with -1 in `token_N` get zeros, too.
    """
    token_M = token_N
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
    """Return the temperature as kernels take it: a number, or contiguous float32."""
    if isinstance(temperature, Tensor):
        return temperature.to(torch.float32).contiguous()
    return temperature
