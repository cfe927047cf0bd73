"""Per token, MoE auxiliary losses with a padding mask weigh as if each rank had all tokens.

Symptom:
    With `calculate_per_token_loss` and a `padding_mask`, load balancing losses have TP x CP times
    their weight under sequence or context parallelism, even if nothing is padded; before 0.19
    `global_aux_loss` has DP times its weight. Packs that are padded to a length pass such a mask.
    No error, and the logged losses are right.

Cause:
    Each router multiplies its losses by the number of its own tokens, and from 0.19 on by the
    number of ranks that share a sequence. With a mask, `get_tokens_per_expert_and_token_count`
    counts a rank's own tokens after the counts were summed over ranks in place: the result is the
    count of all ranks.

Affects:
    0.19 on; 0.16 to 0.18 for `global_aux_loss` alone, because routers multiply by the tokens only
    once there. What the patch does: with a mask each rank counts an equal share of all tokens, as
    without a mask, so that the ranks of a sequence have equal weight even if one of them has all
    the padding. No collective is added. `aux-loss-counts-own-tokens` leaves losses with a mask as
    they are.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 10;
    https://github.com/NVIDIA/Megatron-LM/pull/7481 counts before the reduction, and gives ranks
    with padding less weight.

Remove when:
    a rank's count with a padding mask is taken before the reduction.
    `upstream/aux-loss-counts-others-tokens` has the repair.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_idempotent.megatron import moe

from ._case import Fault, Original, Patch, address, target


def count(
    original: Original, routing_map: Any, reduce_group: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wrap the router's count of tokens: with a padding mask, replace this rank's number of tokens
    by the mean over the ranks of the group. Before 0.19 the mean is multiplied by the number of
    ranks that share a sequence.
    """
    counts = original(routing_map, reduce_group, *args, **kwargs)
    global_tokens_per_expert, local_num_tokens, total_num_tokens = counts
    if not kwargs.get("with_padding_mask"):
        return counts
    groups = kwargs.get("reduce_groups") or (reduce_group,)  # the branch dev has several
    ranks = math.prod(group.size() for group in groups)
    sequence = moe.ranks_of_a_sequence()
    if moe.losses_count_all_ranks():
        local_num_tokens = total_num_tokens / ranks
    elif ranks != sequence:
        local_num_tokens = total_num_tokens / ranks * sequence
    return global_tokens_per_expert, local_num_tokens, total_num_tokens


def reproduce() -> None:
    """Compare a router's auxiliary-loss gradients without a mask and with an all-False mask.
    On stock Megatron the mask that hides nothing multiplies them by the number of ranks.
    """
    import torch

    from ._routers import ROWS, SEQUENCES, gradient, router

    for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
        part = router(kind)
        mask = torch.zeros(ROWS, SEQUENCES, dtype=torch.bool, device="cuda")
        right, masked = gradient(part), gradient(part, mask)
        # The operations are the same, but for a division by the number of tokens, a power of two.
        if not torch.allclose(masked, right, rtol=1e-5, atol=0):
            times = float(masked.norm() / right.norm())
            raise Fault(f"with a mask that hides nothing {kind} has {times:.3g} times its weight")


PATCH = Patch(
    "per token, MoE auxiliary losses with a padding mask weigh as if each rank had all tokens",
    target("moe.moe_utils:get_tokens_per_expert_and_token_count", count),
    since="0.16",
    fixed_by=(
        (
            address("moe.moe_utils:get_tokens_per_expert_and_token_count"),
            "total_num_tokens / reduce_group.size()",
        ),
    ),
    ranks=4,
    given=("aux-loss-counts-own-tokens",),
    groups=("aux-loss",),
)
