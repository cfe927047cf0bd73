"""Computes a few numbers per token in float64, in one launch where torch would take dozens.

They are small beside the logits, but a launch takes microseconds whatever it computes, and those of
some thousand tokens would take as long as reading their logits does.

Legend: N tokens, P parts (segments of this rank's columns, or ranks), B tokens of a program.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call,misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .statistics import Whole
from .triton_kernels import FINITE, on_device_of

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


def launch_coefficients(
    whole: Whole,
    of_logprob_N: Tensor | None,
    of_entropy_N: Tensor | None,
    temperature: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """Compute factor, slope and `of_target` of `GradCoefficients`, [3, N], and indices [N].

    An index is the token's own, or -1 if its outputs have no gradient.
    """
    tokens = len(whole.origin)
    into_3N = whole.origin.new_empty(3, tokens)
    live_N = whole.origin.new_empty(tokens, dtype=torch.int64)
    if not tokens:
        return into_3N, live_N
    per_token = isinstance(temperature, Tensor)
    # A sum's gradient is one number for all tokens.
    given = [None if each is None else each.contiguous() for each in (of_logprob_N, of_entropy_N)]
    with on_device_of(into_3N):
        coefficients_kernel[(triton.cdiv(tokens, _TOKENS),)](
            whole.exponentials,
            whole.mean,
            whole.logprob,
            whole.entropy,
            *(into_3N if each is None else each for each in given),
            temperature if per_token else into_3N,
            into_3N,
            live_N,
            tokens,
            1.0 if isinstance(temperature, Tensor) else float(temperature),
            PER_TOKEN=per_token,
            HAS_LOGPROB=of_logprob_N is not None,
            HAS_ENTROPY=of_entropy_N is not None,
            BLOCK=_TOKENS,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return into_3N, live_N
