"""Per token, MoE's loss per sequence counts less if a microbatch has more rows.

Symptom:
    With `calculate_per_token_loss` and `moe_router_load_balancing_type="seq_aux_loss"` the gradient
    of the load balancing loss is divided by the number of rows of a microbatch: half as much with
    two rows as with one. Routers balance worse with larger microbatches. No error, and the logged
    loss is right.

Cause:
    In the end gradients are divided by the tokens of the step, so the router multiplies its loss by
    the tokens of the microbatch. For this kind of loss it counts the tokens of one row only.

Affects:
    0.16 to 0.18, and commits before July 2026. What the patch does: the loss is also multiplied by
    the number of rows, as 0.19 does. Logged losses do not change.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/5798

Remove when:
    no supported release counts `local_num_tokens` of one row only.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import moe

from ._case import Original, Patch, a_body_has, arguments, expect_weight_per_token, target


def apply(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap "seq_aux_loss", the load balancing loss per sequence: multiply it by the number of rows.
    Do so only with `calculate_per_token_loss`. The logged loss does not change, because upstream
    divides it by the coefficient, which is multiplied, too.
    """
    call = arguments(original, args, kwargs)
    router = call["self"]
    rows = call["bsz"] if router.calculate_per_token_loss else 1
    with moe.multiplied(router.config, "moe_aux_loss_coeff", rows):
        return original(*args, **kwargs)


def reproduce() -> None:
    """Compare a router's gradient from "seq_aux_loss" with and without `calculate_per_token_loss`.
    With that option, stock Megatron divides the gradient by the number of rows.
    """
    expect_weight_per_token(moe_router_load_balancing_type="seq_aux_loss")


PATCH = Patch(
    "per token, MoE's loss of sequences is divided by a microbatch's rows",
    target("moe.router:TopKRouter._apply_seq_aux_loss", apply),
    since="0.16",
    groups=("aux-loss",),
    fixed_when=a_body_has("local_num_tokens * bsz"),
    ranks=1,
)
