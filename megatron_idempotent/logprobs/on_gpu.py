"""Does the work of `kernels` with Triton: rows are read once and written once.

Only this file launches them, and it is imported only where they are used. Its own kernels compute
a few numbers per token in float64, in one launch where torch would take dozens: they are small
compared to the logits, but each launch takes microseconds, and for some thousand tokens dozens of
launches would take as long as reading the logits.

Legend: N tokens, P parts (segments of this rank's columns, or ranks), B tokens of a program.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call,misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import as_matrices, kept_places, masked
from .statistics import (
    GradCoefficients,
    OutputGradients,
    Partial,
    TokenBatch,
    VocabStatistics,
    all_gathered,
)
from .triton_kernels import (
    FINITE,
    IN_USE,
    launch_gradient,
    launch_statistics,
    on_device_of,
    temperature_arguments,
)


def local_statistics(logits: Tensor, kept_N: Tensor | None, batch: TokenBatch) -> Partial:
    """Return, for each kept token, the statistics of this rank's columns of the vocabulary, as a
    `Partial`; rows are not copied.
    """
    panels, shape = as_matrices(logits)[0], IN_USE["statistics"]
    batch = _computed(batch)
    parts: list[Tensor] = []
    start = 0
    for panel, mask in masked(panels, kept_N):
        row_n = None
        if mask is not None:
            alone = len(panels) == 1
            row_n = kept_places(mask, len(batch.targets)) if alone else mask.nonzero().squeeze(1)
        tokens = slice(start, start + len(panel if row_n is None else row_n))
        start = tokens.stop
        if tokens.start < tokens.stop:
            parts.append(launch_statistics(panel, row_n, batch.select(tokens), shape))
    parts_PN4 = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if len(parts_PN4) > 1:
        fields_N4 = launch_combine(parts_PN4, batch.local, shape.segment, batch, is_global=False)
    else:
        fields_N4 = parts_PN4[0]
    return Partial(*fields_N4.unbind(-1))


def global_statistics(partial: Partial, batch: TokenBatch) -> VocabStatistics:
    """Combine the ranks' statistics like `statistics.combine`, with one all-gather of the group."""
    parts_RN4 = all_gathered(torch.stack(partial, dim=-1), batch.columns.group)
    width = batch.columns.per_rank
    batch = _computed(batch)
    fields_6N = launch_combine(parts_RN4, batch.targets, width, batch, is_global=True)
    return VocabStatistics(*fields_6N)


def grad_coefficients(outputs: OutputGradients) -> tuple[GradCoefficients, Tensor]:
    """Compute each token's `GradCoefficients` with Triton, as `GradCoefficients.from_outputs` does
    with torch. Return them, and the token indices 0 to N - 1, with -1 in place of tokens whose
    outputs' gradients are zero.

    The host does not wait.
    """
    batch, total, d_logprob_N, d_entropy_N = outputs
    tokens = len(total.origin)
    into_3N = total.origin.new_empty(3, tokens)
    token_N = total.origin.new_empty(tokens, dtype=torch.int64)
    # A sum's gradient is one number for all tokens.
    gradients = (
        into_3N if gradient is None else gradient.contiguous()
        for gradient in (d_logprob_N, d_entropy_N)
    )
    with on_device_of(into_3N):
        if tokens:
            coefficients_kernel[(triton.cdiv(tokens, _TOKENS),)](
                *(total.exponentials, total.mean, total.logprob, total.entropy, *gradients),
                into=into_3N,
                live=token_N,
                tokens=tokens,
                HAS_LOGPROB=d_logprob_N is not None,
                HAS_ENTROPY=d_entropy_N is not None,
                **temperature_arguments(_computed(batch), into_3N),
                **_LAUNCH,
            )
    factor_N, slope_N, of_target_N = into_3N
    slope = None if d_entropy_N is None else slope_N
    return GradCoefficients(total.origin, factor_N, slope, of_target_N), token_N


def write_gradient(
    panels: list[Tensor],
    into: list[Tensor],
    kept_N: Tensor | None,
    token_N: Tensor | None,
    slopes: GradCoefficients,
    batch: TokenBatch,
) -> None:
    """Write the logits' gradient into all of `into`: zeros for tokens that are not kept, and in
    padded columns.

    `slopes` and `batch` are of all kept tokens. Those with -1 in `token_N` get zeros, too.
    """
    token_M = token_N
    if kept_N is not None:
        place_M = kept_N.cumsum(0) - 1
        if token_M is not None and len(token_M):
            place_M = token_M[place_M.clamp(min=0)]
        token_M = torch.where(kept_N, place_M, -1)
    batch, start = _computed(batch), 0
    for panel, into_panel in zip(panels, into, strict=True):
        if not into_panel.numel():
            continue
        rows = slice(start, start + len(panel))
        start = rows.stop
        of_rows = None if token_M is None else token_M[rows], slopes, batch
        if token_M is None and len(panels) > 1:
            of_rows = None, slopes.select(rows), batch.select(rows)
        launch_gradient(panel, into_panel, *of_rows, IN_USE["gradient"])


def _computed(batch: TokenBatch) -> TokenBatch:
    """Return the batch with its temperature as a number or as a contiguous float32 tensor.
    The kernels can read no other forms.
    """
    if not isinstance(batch.temperature, Tensor):
        return batch
    return batch._replace(temperature=batch.temperature.to(torch.float32).contiguous())


#: Tokens of a program.
_TOKENS = 128
_LAUNCH = {"BLOCK": _TOKENS, "num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def combine_kernel(
    parts: tl.tensor,
    targets: tl.tensor,
    temperatures: tl.tensor,
    into: tl.tensor,
    tokens: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    temperature: tl.tensor,
    PER_TOKEN: tl.constexpr,
    GLOBAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Combine statistics [P, N, 4] of P parts of the vocabulary into those of all parts: `Partial`
    [N, 4], or if `GLOBAL` `VocabStatistics` [6, N].

    A target is in part `targets` // `width`.
    """
    token_B = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside_B = token_B < tokens
    t_B = tl.zeros([BLOCK], tl.float64) + temperature
    if PER_TOKEN:
        t_B = tl.load(temperatures + token_B, mask=inside_B, other=1.0).to(tl.float64)
    target_B = tl.load(targets + token_B, mask=inside_B, other=-1)
    largest_B = tl.load(parts + token_B * 4, mask=inside_B, other=0.0)
    for part in range(1, count):
        of_part_B = parts + (token_B + part * tokens) * 4
        part_largest_B = tl.load(of_part_B, mask=inside_B, other=0.0)
        largest_B = tl.maximum(largest_B, part_largest_B, propagate_nan=tl.PropagateNan.ALL)
    origin_B = largest_B.to(tl.float64)
    sum_B = tl.zeros([BLOCK], tl.float64)
    moment_B = tl.zeros([BLOCK], tl.float64)
    z_B = tl.zeros([BLOCK], tl.float64)
    for part in range(count):
        of_part_B = parts + (token_B + part * tokens) * 4
        part_origin_B = tl.load(of_part_B, mask=inside_B, other=0.0).to(tl.float64)
        part_sum_B = tl.load(of_part_B + 1, mask=inside_B, other=0.0).to(tl.float64)
        part_moment_B = tl.load(of_part_B + 2, mask=inside_B, other=0.0).to(tl.float64)
        part_z_B = tl.load(of_part_B + 3, mask=inside_B, other=0.0).to(tl.float64)
        behind_B = (part_origin_B - origin_B) / t_B
        weight_B = tl.exp(behind_B)
        sum_B += weight_B * part_sum_B
        moment_B += weight_B * (part_moment_B + behind_B * part_sum_B)
        first = part * width
        has_target_B = (target_B >= first) & (target_B < first + width)
        z_B = tl.where(has_target_B, part_z_B + behind_B, z_B)
    if GLOBAL:
        target_B = tl.exp(z_B)
        sum_B += target_B
        moment_B += tl.where(target_B == 0, 0.0, target_B * z_B)
        log_sum_B = tl.log(sum_B)
        mean_B = moment_B / sum_B
        into_B = into + token_B
        tl.store(into_B, largest_B, mask=inside_B)
        tl.store(into_B + tokens, sum_B.to(tl.float32), mask=inside_B)
        tl.store(into_B + 2 * tokens, mean_B.to(tl.float32), mask=inside_B)
        tl.store(into_B + 3 * tokens, log_sum_B.to(tl.float32), mask=inside_B)
        tl.store(into_B + 4 * tokens, (z_B - log_sum_B).to(tl.float32), mask=inside_B)
        tl.store(into_B + 5 * tokens, (log_sum_B - mean_B).to(tl.float32), mask=inside_B)
    else:
        into_B = into + token_B * 4
        tl.store(into_B, largest_B, mask=inside_B)
        tl.store(into_B + 1, sum_B.to(tl.float32), mask=inside_B)
        tl.store(into_B + 2, moment_B.to(tl.float32), mask=inside_B)
        tl.store(into_B + 3, z_B.to(tl.float32), mask=inside_B)


@triton.jit
def coefficients_kernel(
    exponentials: tl.tensor,
    mean: tl.tensor,
    logprob: tl.tensor,
    entropy: tl.tensor,
    d_logprob: tl.tensor,
    d_entropy: tl.tensor,
    temperatures: tl.tensor,
    into: tl.tensor,
    live: tl.tensor,
    tokens: tl.tensor,
    temperature: tl.tensor,
    PER_TOKEN: tl.constexpr,
    HAS_LOGPROB: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write each token's factor, slope and `of_target` of `GradCoefficients` into [3, N], and its
    index into [N].

    An index is the token's own, or -1 if its outputs have no gradient.
    """
    token_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside_B = token_B < tokens
    t_B = tl.zeros([BLOCK], tl.float64) + temperature
    if PER_TOKEN:
        t_B = tl.load(temperatures + token_B, mask=inside_B, other=1.0).to(tl.float64)
    sum_B = tl.load(exponentials + token_B, mask=inside_B, other=1.0).to(tl.float64)
    logprob_B = tl.load(logprob + token_B, mask=inside_B, other=0.0).to(tl.float64)
    factor_B = tl.zeros([BLOCK], tl.float64)
    of_target_B = tl.zeros([BLOCK], tl.float64)
    is_live_B = token_B < 0
    p_B = tl.exp(logprob_B)
    inverse_B = 1 / (sum_B * t_B)
    if HAS_LOGPROB:
        d_output_B = tl.load(d_logprob + token_B, mask=inside_B, other=0.0)
        is_live_B = is_live_B | (d_output_B != 0)
        factor_B = -d_output_B.to(tl.float64) * inverse_B
        # In float64 1 - p has as many bits as the sum had that the log-prob is the logarithm of.
        of_target_B = -d_output_B.to(tl.float64) / t_B * (p_B - 1)
    if HAS_ENTROPY:
        d_output_B = tl.load(d_entropy + token_B, mask=inside_B, other=0.0)
        is_live_B = is_live_B | (d_output_B != 0)
        d_output_B = d_output_B.to(tl.float64)
        mean_B = tl.load(mean + token_B, mask=inside_B, other=0.0).to(tl.float64)
        entropy_B = tl.load(entropy + token_B, mask=inside_B, other=0.0).to(tl.float64)
        factor_B += d_output_B * mean_B * inverse_B
        inner_B = logprob_B + entropy_B
        inner_B = tl.where(inner_B < FINITE, FINITE, inner_B)
        of_target_B -= d_output_B / t_B * p_B * inner_B
        slope_B = -d_output_B * inverse_B
        tl.store(into + tokens + token_B, slope_B.to(tl.float32), mask=inside_B)
    tl.store(into + token_B, factor_B.to(tl.float32), mask=inside_B)
    tl.store(into + 2 * tokens + token_B, of_target_B.to(tl.float32), mask=inside_B)
    tl.store(live + token_B, tl.where(is_live_B, token_B, -1).to(tl.int64), mask=inside_B)


def launch_combine(
    parts_PN4: Tensor, target_N: Tensor, width: int, batch: TokenBatch, *, is_global: bool
) -> Tensor:
    """Combine statistics [P, N, 4] of P parts of the vocabulary into those of all parts: `Partial`
    [N, 4], or with `is_global` `VocabStatistics` [6, N].

    A target is in part `target_N` // `width`.
    """
    count, tokens, _ = parts_PN4.shape
    fields = len(VocabStatistics._fields)
    into = parts_PN4.new_empty((fields, tokens) if is_global else (tokens, 4))
    if not tokens:
        return into
    with on_device_of(parts_PN4):
        combine_kernel[(triton.cdiv(tokens, _TOKENS),)](
            *(parts_PN4, target_N),
            into=into,
            tokens=tokens,
            count=count,
            width=width,
            GLOBAL=is_global,
            **temperature_arguments(batch, parts_PN4),
            **_LAUNCH,
        )
    return into
