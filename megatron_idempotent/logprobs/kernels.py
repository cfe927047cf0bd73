"""Computes statistics of logits and their gradient, one block of rows at a time.

The softmax is never kept: the gradient computes it again from the logits, and from a few numbers
per token.

Legend: N tokens, n those of a block, K targets of a token, V columns of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .rows import as_matrices, blocks_of, flat_indices, rows_of_a_block, submask
from .statistics import (
    FINITE,
    GradCoefficients,
    Partial,
    TokenBatch,
    VocabStatistics,
    accumulated,
    combine,
    is_local,
    is_unit_temperature,
    per_row,
    place_of,
)

#: Between these bounds float32 sums of exponentials are exact enough, and sums over thousands of
#: ranks and parts are finite.
_LEAST, _MOST = 1e-20, 1e35
#: The largest logit of a target whose exponential can be added to such sums.
_MOST_OF_ONE = 80.0


class Scratch:
    """Holds scratch memory for computing with blocks of rows of logits: at most two buffers, which
    all blocks share.
    """

    def __init__(self, panels: list[Tensor], workspace_bytes: int, *, moments: bool) -> None:
        like, sizes = panels[0], [len(panel) for panel in panels]
        self._dtype = accumulated(like.dtype)
        self.moments = moments
        self._columns, self._device = like.shape[1], like.device
        # If one buffer is enough, the logits' own rows use the cache instead of the second buffer.
        fitting = rows_of_a_block(self._columns, workspace_bytes, 2, self._dtype)
        self.rows = min(fitting, max(sizes) or 1)
        self._buffers: dict[int, Tensor] = {}
        # Nearly all blocks are of one size, and a view costs as much as a small operation.
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, number: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return two views of buffer `number`: as [rows, columns], and as [rows, columns + 1].

        The extra column receives the values for targets of other ranks.
        """
        if (number, rows) not in self._views:
            if number not in self._buffers:
                shape = self.rows, self._columns + 1
                self._buffers[number] = torch.empty(shape, dtype=self._dtype, device=self._device)
            with_room = self._buffers[number][:rows]
            self._views[number, rows] = with_room[:, :-1], with_room
        return self._views[number, rows]

    def read(self, logits_nV: Tensor) -> Tensor:
        """Return the logits in the dtype of the statistics: as they are, or copied to buffer 0."""
        if logits_nV.dtype == self._dtype:
            return logits_nV
        return self(0, len(logits_nV))[0].copy_(logits_nV)

    def without(self, logits_nV: Tensor, apart_nK: Tensor) -> Tensor:
        """Copy `logits_nV` to buffer 0, set the columns `apart_nK` to -inf, and return the copy."""
        copy_nV, with_room_nV = self(0, len(logits_nV))
        if copy_nV.data_ptr() != logits_nV.data_ptr():
            copy_nV.copy_(logits_nV)
        with_room_nV.scatter_(1, apart_nK, -torch.inf)
        return copy_nV


def local_statistics(logits: Tensor, kept_N: Tensor | None, batch: TokenBatch) -> Partial:
    """Return, for each kept token, the statistics of this rank's columns of the vocabulary, as a
    `Partial`.

    `batch` has an entry for each kept token.
    """
    local_N, columns, options = batch.local, batch.columns, batch.options
    like_N = torch.zeros(len(local_N), dtype=accumulated(logits.dtype), device=logits.device)
    partial = Partial.empty(like_N, like_N.new_zeros(local_N.shape))
    if not len(local_N) or not columns.real:
        return partial
    if options.backend == "triton":
        from . import on_gpu

        return on_gpu.local_statistics(logits, kept_N, batch)
    temperature = batch.temperature
    panels = [panel[:, : columns.real] for panel in as_matrices(logits)[0]]
    scratch = Scratch(panels, options.workspace_bytes, moments=options.entropy)
    place_NK, is_local_NK = place_of(local_N, columns.real)
    # The sums leave the targets out; targets of other ranks go into the extra column.
    apart_NK = torch.where(is_local_NK, place_NK, columns.real)
    token_N = torch.arange(len(local_N), device=local_N.device)
    target_NK = partial.target.view(place_NK.shape)
    for panel, entry_e, row_e in flat_indices(panels, kept_N, token_N):
        target_NK[entry_e] = panel[row_e[:, None], place_NK[entry_e]].to(like_N.dtype)
    if options.entropy or not is_unit_temperature(temperature):
        _sums(panels, apart_NK, kept_N, temperature, partial, scratch, subtract_max=True)
    else:
        # If exp(logit) is a normal number it is exact: no subtraction has rounded the logit.
        partial.origin.zero_()
        _sums(panels, apart_NK, kept_N, temperature, partial, scratch, subtract_max=False)
        within_N = (partial.exponentials > _LEAST) & (partial.exponentials < _MOST)
        beyond_N = ~(within_N & (target_NK < _MOST_OF_ONE).all(-1))
        if bool(beyond_N.any()):
            # Only these tokens, so that a token's statistics do not depend on other tokens.
            beyond_n = Partial(*(field[beyond_N] for field in partial))
            mask_N, apart_nK = submask(kept_N, beyond_N), apart_NK[beyond_N]
            _sums(panels, apart_nK, mask_N, temperature, beyond_n, scratch, subtract_max=True)
            for into_N, values_n in zip(partial, beyond_n, strict=True):
                into_N[beyond_N] = values_n
    if local_N.dim() == 2:
        partial.target.copy_(torch.where(is_local_NK, partial.target, 0.0))
    else:
        z_N = (partial.target - partial.origin) / temperature
        partial.target.copy_(torch.where(is_local_NK[:, 0], z_N, 0.0))
    return partial


def global_statistics(partial: Partial, batch: TokenBatch) -> VocabStatistics:
    """Combine the ranks' statistics into those of the whole vocabulary.

    The group's ranks take part in one all-gather.
    """
    if batch.options.backend == "triton":
        from . import on_gpu

        return on_gpu.global_statistics(partial, batch)
    return combine(partial, batch.owner, batch.temperature, batch.columns.group)


def _sums(
    panels: list[Tensor],
    apart_NK: Tensor,
    kept_N: Tensor | None,
    temperature: Tensor | float,
    partial: Partial,
    scratch: Scratch,
    *,
    subtract_max: bool,
) -> None:
    """Write into `partial`, for each kept token, the sum of exp((logit - largest) / temperature)
    over all columns except the targets', which are `apart_NK`; also the sum's moment if entropies
    are computed. Without `subtract_max` nothing is subtracted; with it, `origin` gets the largest
    logit (of all columns or, with several targets per token, of the others).
    """
    per_token = partial.origin[:, None], apart_NK, partial.exponentials, partial.moments
    many = partial.target.dim() == 2
    for block, divisor, origin_n1, apart_nK, sums_n, moments_n in _blocks_with(
        panels, kept_N, scratch.rows, temperature, *per_token
    ):
        logits_nV = scratch.read(block.read(panels))
        if subtract_max and many:
            logits_nV = scratch.without(logits_nV, apart_nK)
        if subtract_max:
            torch.amax(logits_nV, -1, keepdim=True, out=origin_n1).clamp_(min=FINITE)
        subtracted_n1 = origin_n1 if subtract_max else None
        z_nV = _scaled(logits_nV, subtracted_n1, divisor, scratch(0, len(logits_nV))[0])
        exponentials_nV, with_room_nV = scratch(int(scratch.moments), len(z_nV))
        torch.exp(z_nV, out=exponentials_nV)
        with_room_nV.scatter_(1, apart_nK, 0.0)
        torch.sum(exponentials_nV, -1, out=sums_n)
        if scratch.moments:
            weighted_nV = exponentials_nV.mul_(z_nV.clamp_(min=FINITE))
            torch.sum(weighted_nV, -1, out=moments_n)


def write_gradient(
    panels: list[Tensor],
    into: list[Tensor],
    kept_N: Tensor | None,
    slopes: GradCoefficients,
    batch: TokenBatch,
) -> None:
    """Write the logits' gradient of the kept tokens into `into`, which may be the logits."""
    local_N, real = batch.local, batch.columns.real
    if not real or not len(local_N):
        return
    panels, into = ([panel[:, :real] for panel in side] for side in (panels, into))
    scratch = Scratch(panels, batch.options.workspace_bytes, moments=batch.options.entropy)
    per_token = (
        field if field is None else field[:, None]
        for field in (slopes.origin, slopes.factor, slopes.slope)
    )
    for block, divisor, origin_n1, factor_n1, slope_n1 in _blocks_with(
        panels, kept_N, scratch.rows, batch.temperature, *per_token
    ):
        logits_nV = block.read(panels)
        # Without a conversion or a scatter the gradient is computed in place.
        in_place = isinstance(block.rows, slice) and into[0].dtype == slopes.factor.dtype
        out_nV = block.read(into) if in_place else scratch(0, len(logits_nV))[0]
        z_nV = _scaled(scratch.read(logits_nV), origin_n1, divisor, out_nV)
        if slope_n1 is None:
            gradient_nV = torch.exp(z_nV, out=out_nV).mul_(factor_n1)
        else:
            exponentials_nV = torch.exp(z_nV, out=scratch(1, len(z_nV))[0])
            # -inf·0 would be NaN.
            gradient_nV = z_nV.clamp_(min=FINITE).mul_(slope_n1)
            gradient_nV.add_(factor_n1).mul_(exponentials_nV)
        if not in_place:
            block.write(into, gradient_nV)
    # The index of a target's token, and with K targets the index among these.
    place_E = is_local(local_N, real).nonzero().unbind(1)
    for panel, entry_e, row_e in flat_indices(into, kept_N, place_E[0]):
        place_e = tuple(index_E[entry_e] for index_E in place_E)
        panel[row_e, local_N[place_e]] = slopes.of_target[place_e].to(panel.dtype)


def _blocks_with(
    panels: list[Tensor],
    kept_N: Tensor | None,
    rows: int,
    temperature: Tensor | float,
    *per_token: Tensor | None,
) -> Iterator[tuple[Any, ...]]:
    """Yield (block, temperature, *values) for each `RowBlock` of the kept rows. The values are the
    entries of each `per_token` tensor for the block's tokens.

    A tensor of temperatures is yielded as [n, 1], None as None.
    """
    blocks = list(blocks_of(panels, kept_N, rows))
    sizes = [block.tokens.stop - block.tokens.start for block in blocks]
    columns = (
        torch.split(value, sizes) if isinstance(value, Tensor) else [value] * len(blocks)
        for value in (per_row(temperature), *per_token)
    )
    return zip(blocks, *columns, strict=True) if blocks else iter(())


def _scaled(
    logits_nV: Tensor, origin_n1: Tensor | None, temperature: Tensor | float, out_nV: Tensor
) -> Tensor:
    """Return (logits - origin) / temperature, written to `out_nV`. Without an origin and with
    temperature 1, return `logits_nV` itself, and write nothing.

    A tensor of temperatures is [n, 1].
    """
    if origin_n1 is not None:
        logits_nV = torch.sub(logits_nV, origin_n1, out=out_nV)
    if not is_unit_temperature(temperature):
        logits_nV = torch.div(logits_nV, temperature, out=out_nV)
    return logits_nV
