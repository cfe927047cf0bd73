"""Does with Triton's kernels what `kernels` does with torch; reads rows once, writes them once.

Only this file launches them, and it is imported only where they are used. Its own kernels compute
a few numbers per token in float64, in one launch where torch would take dozens: they are small
beside the logits, but a launch takes microseconds whatever it computes, and those of some thousand
tokens would take as long as reading their logits does.

Legend: N tokens, P parts (segments of this rank's columns, or ranks), B tokens of a program.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call,misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernels import GradCoefficients
from .sources import as_matrices, kept_places
from .statistics import Columns, ComputeOptions, Partial, TokenBatch, Whole, all_gathered
from .triton_kernels import FINITE, chosen, launch_gradient, launch_statistics, on_device_of


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
        arguments = (matrix, row_n, here, of_these, columns.real, wanted.entropy)
        found.append(launch_statistics(*arguments, chosen["statistics"]))
    parts_PN4 = found[0] if len(found) == 1 else torch.cat(found, 1)
    if len(parts_PN4) == 1:
        return Partial(*parts_PN4[0].unbind(-1))
    width = chosen["statistics"].segment
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
    tokens, per_token = len(whole.origin), isinstance(temperature, Tensor)
    into_3N = whole.origin.new_empty(3, tokens)
    token_N = whole.origin.new_empty(tokens, dtype=torch.int64)
    # A sum's gradient is one number for all tokens.
    given = [None if each is None else each.contiguous() for each in (of_logprob_N, of_entropy_N)]
    with on_device_of(into_3N):
        if tokens:
            coefficients_kernel[(triton.cdiv(tokens, _TOKENS),)](
                whole.exponentials,
                whole.mean,
                whole.logprob,
                whole.entropy,
                *(into_3N if each is None else each for each in given),
                temperature if per_token else into_3N,
                into_3N,
                token_N,
                tokens,
                1.0 if isinstance(temperature, Tensor) else float(temperature),
                PER_TOKEN=per_token,
                HAS_LOGPROB=of_logprob_N is not None,
                HAS_ENTROPY=of_entropy_N is not None,
                BLOCK=_TOKENS,
                num_warps=4,
                enable_fp_fusion=True,
            )
    factor_N, slope_N, of_target_N = into_3N
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
        arguments = matrix, into_matrix, of_these, some, t, columns.real
        launch_gradient(*arguments, chosen["gradient"])


def _computed(temperature: Tensor | float) -> Tensor | float:
    """Return the temperature as kernels take it: a number, or contiguous float32."""
    if isinstance(temperature, Tensor):
        return temperature.to(torch.float32).contiguous()
    return temperature


_TOKENS = 128


@triton.jit
def combine_kernel(
    parts: tl.tensor,
    place: tl.tensor,
    temperatures: tl.tensor,
    into: tl.tensor,
    tokens: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    temperature: tl.tensor,
    PER_TOKEN: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Combine parts [P, N, 4] into `Partial` [N, 4], or with `WHOLE` into `Whole` [6, N].

    A target is in part `place` // `width`.
    """
    token_B = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    there_B = token_B < tokens
    t_B = tl.zeros([BLOCK], tl.float64) + temperature
    if PER_TOKEN:
        t_B = tl.load(temperatures + token_B, mask=there_B, other=1.0).to(tl.float64)
    place_B = tl.load(place + token_B, mask=there_B, other=-1)
    largest_B = tl.load(parts + token_B * 4, mask=there_B, other=0.0)
    for part in range(1, count):
        of_part_B = parts + (token_B + part * tokens) * 4
        found_B = tl.load(of_part_B, mask=there_B, other=0.0)
        largest_B = tl.maximum(largest_B, found_B, propagate_nan=tl.PropagateNan.ALL)
    origin_B = largest_B.to(tl.float64)
    sum_B = tl.zeros([BLOCK], tl.float64)
    moment_B = tl.zeros([BLOCK], tl.float64)
    z_B = tl.zeros([BLOCK], tl.float64)
    for part in range(count):
        of_part_B = parts + (token_B + part * tokens) * 4
        part_origin_B = tl.load(of_part_B, mask=there_B, other=0.0).to(tl.float64)
        part_sum_B = tl.load(of_part_B + 1, mask=there_B, other=0.0).to(tl.float64)
        part_moment_B = tl.load(of_part_B + 2, mask=there_B, other=0.0).to(tl.float64)
        part_z_B = tl.load(of_part_B + 3, mask=there_B, other=0.0).to(tl.float64)
        behind_B = (part_origin_B - origin_B) / t_B
        weight_B = tl.exp(behind_B)
        sum_B += weight_B * part_sum_B
        moment_B += weight_B * (part_moment_B + behind_B * part_sum_B)
        first = part * width
        own_B = (place_B >= first) & (place_B < first + width)
        z_B = tl.where(own_B, part_z_B + behind_B, z_B)
    if WHOLE:
        target_B = tl.exp(z_B)
        sum_B += target_B
        moment_B += tl.where(target_B == 0, 0.0, target_B * z_B)
        log_sum_B = tl.log(sum_B)
        mean_B = moment_B / sum_B
        into_B = into + token_B
        tl.store(into_B, largest_B, mask=there_B)
        tl.store(into_B + tokens, sum_B.to(tl.float32), mask=there_B)
        tl.store(into_B + 2 * tokens, mean_B.to(tl.float32), mask=there_B)
        tl.store(into_B + 3 * tokens, log_sum_B.to(tl.float32), mask=there_B)
        tl.store(into_B + 4 * tokens, (z_B - log_sum_B).to(tl.float32), mask=there_B)
        tl.store(into_B + 5 * tokens, (log_sum_B - mean_B).to(tl.float32), mask=there_B)
    else:
        into_B = into + token_B * 4
        tl.store(into_B, largest_B, mask=there_B)
        tl.store(into_B + 1, sum_B.to(tl.float32), mask=there_B)
        tl.store(into_B + 2, moment_B.to(tl.float32), mask=there_B)
        tl.store(into_B + 3, z_B.to(tl.float32), mask=there_B)


@triton.jit
def coefficients_kernel(
    exponentials: tl.tensor,
    mean: tl.tensor,
    logprob: tl.tensor,
    entropy: tl.tensor,
    of_logprob: tl.tensor,
    of_entropy: tl.tensor,
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
    """Write factor, slope and `of_target` of `GradCoefficients`, [3, N], and indices [N].

    An index is the token's own, or -1 if its outputs have no gradient.
    """
    token_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there_B = token_B < tokens
    t_B = tl.zeros([BLOCK], tl.float64) + temperature
    if PER_TOKEN:
        t_B = tl.load(temperatures + token_B, mask=there_B, other=1.0).to(tl.float64)
    sum_B = tl.load(exponentials + token_B, mask=there_B, other=1.0).to(tl.float64)
    logprob_B = tl.load(logprob + token_B, mask=there_B, other=0.0).to(tl.float64)
    factor_B = tl.zeros([BLOCK], tl.float64)
    of_target_B = tl.zeros([BLOCK], tl.float64)
    is_live_B = token_B < 0
    p_B = tl.exp(logprob_B)
    inverse_B = 1 / (sum_B * t_B)
    if HAS_LOGPROB:
        given_B = tl.load(of_logprob + token_B, mask=there_B, other=0.0)
        is_live_B = is_live_B | (given_B != 0)
        factor_B = -given_B.to(tl.float64) * inverse_B
        # In float64 1 - p has as many bits as the sum had that the log-prob is the logarithm of.
        of_target_B = -given_B.to(tl.float64) / t_B * (p_B - 1)
    if HAS_ENTROPY:
        given_B = tl.load(of_entropy + token_B, mask=there_B, other=0.0)
        is_live_B = is_live_B | (given_B != 0)
        given_B = given_B.to(tl.float64)
        mean_B = tl.load(mean + token_B, mask=there_B, other=0.0).to(tl.float64)
        entropy_B = tl.load(entropy + token_B, mask=there_B, other=0.0).to(tl.float64)
        factor_B += given_B * mean_B * inverse_B
        inner_B = logprob_B + entropy_B
        inner_B = tl.where(inner_B < FINITE, FINITE, inner_B)
        of_target_B -= given_B / t_B * p_B * inner_B
        slope_B = -given_B * inverse_B
        tl.store(into + tokens + token_B, slope_B.to(tl.float32), mask=there_B)
    tl.store(into + token_B, factor_B.to(tl.float32), mask=there_B)
    tl.store(into + 2 * tokens + token_B, of_target_B.to(tl.float32), mask=there_B)
    tl.store(live + token_B, tl.where(is_live_B, token_B, -1).to(tl.int64), mask=there_B)


def launch_combine(
    parts_PN4: Tensor, place_N: Tensor, width: int, temperature: Tensor | float, *, whole: bool
) -> Tensor:
    """Combine parts [P, N, 4] into `Partial` [N, 4], or with `whole` into `Whole` [6, N].

    A target is in part `place_N` // `width`.
    """
    count, tokens, _ = parts_PN4.shape
    into = parts_PN4.new_empty((len(Whole._fields), tokens) if whole else (tokens, 4))
    if not tokens:
        return into
    per_token = isinstance(temperature, Tensor)
    with on_device_of(parts_PN4):
        combine_kernel[(triton.cdiv(tokens, _TOKENS),)](
            parts_PN4,
            place_N,
            temperature if per_token else parts_PN4,
            into,
            tokens,
            count,
            width,
            1.0 if isinstance(temperature, Tensor) else float(temperature),
            PER_TOKEN=per_token,
            WHOLE=whole,
            BLOCK=_TOKENS,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return into
