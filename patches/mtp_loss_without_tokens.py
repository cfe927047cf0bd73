"""An MTP loss is NaN if none of a rank's tokens counts, and each rank weighs its tokens separately.

Symptom:
    With multi-token prediction (MTP), a loss mask and DDP that averages gradients, all gradients
    become NaN as soon as one microbatch of one rank has no token to predict. Under context
    parallelism that happens if all counting tokens are on other ranks. If each rank has some,
    tokens of a rank with few count more: with 13 on one of two ranks and 21 on the other a small
    model's gradient is off by 25 % of its norm. The logged MTP loss has the same fault.

Cause:
    The loss of each MTP layer is divided by the sum of the rank's own mask, which `roll_tensor`
    returns.

Affects:
    0.12 to 0.16. From 0.17 on there is no division by zero, and `mtp-loss-per-context-rank` repairs
    the rest. What the patch does: the divisor is the mean over context-parallel ranks, and at least
    1 / their number. This costs one collective of one number per shift. With
    `calculate_per_token_loss` losses are added up, and only the logged loss changes.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/3396

Remove when:
    0.16 is no longer supported.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, address, of_context_rank, target


def roll(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap `roll_tensor`, the shift of MTP tensors, whose second result is a number of tokens.
    Replace that number by the mean of all context-parallel ranks' numbers, which is never zero. A
    collective over these ranks.
    """
    import torch
    from megatron.core import parallel_state

    rolled, number = original(*args, **kwargs)
    ranks = parallel_state.get_context_parallel_world_size()
    if ranks > 1:
        number = number.clone()
        torch.distributed.all_reduce(number, group=parallel_state.get_context_parallel_group())
    return rolled, number.clamp(min=1) / ranks


def reproduce() -> None:
    """Run an MTP model whose tokens count on only one of two context-parallel ranks.
    On stock Megatron the MTP layer's gradient is NaN.
    """
    import torch

    from megatron_idempotent.proof.cpu import tiny
    from megatron_idempotent.step import own_positions

    model = tiny.build(
        cp=2,
        overlap_grad_reduce=False,
        distributed_optimizer=False,
        mtp=1,
        config_overrides={"mtp_loss_scaling_factor": 0.5},
    )
    (chunk,) = model.chunks
    tokens = next(tiny.microbatches(0))
    counts = torch.zeros_like(tokens, dtype=torch.float32)
    counts[:, 1 : tiny.SEQUENCE // 4] = 1  # the first rank's first piece
    chunk.zero_grad_buffer()
    of_context_rank(chunk, tokens, own_positions(counts)).mean().backward()
    gradient = chunk.module.mtp.layers[0].eh_proj.weight.main_grad
    if not gradient.isfinite().all():
        raise Fault("an MTP gradient is NaN if no token of a rank counts")


PATCH = Patch(
    "an MTP loss is NaN where none of a rank's tokens counts",
    target("mtp.roll_tensor", roll),
    before="0.17",
    fixed_by=((address("mtp.process_mtp_loss"), "num_tokens.clamp(min=1)"),),
)
