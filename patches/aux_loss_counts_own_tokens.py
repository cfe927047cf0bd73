"""Per token, MoE auxiliary losses count less the more ranks share a sequence.

Symptom:
    With `calculate_per_token_loss`, the load balancing loss and the z-loss of experts have 1/(TP x
    CP) of their weight under sequence or context parallelism: 1/2 on two ranks, 1/16 on sixteen.
    Routers balance worse in one layout than in another. No error, and the logged losses are right.

Cause:
    In the end all gradients are divided by the tokens of the step, so each router multiplies its
    losses by a number of tokens: that of its own tokens, which are a part of the sequence. The
    other ranks' losses do not make up for it, because each rank's loss is already that of the
    complete sequence.

Affects:
    0.12 to 0.18. What the patch does: with `calculate_per_token_loss` the losses are also
    multiplied by the number of ranks that share a sequence, as 0.19 does. Logged losses do not
    change. If a router gets a padding mask (from 0.16 on), its load balancing losses already count
    the tokens of all these ranks, because of `aux-loss-counts-others-tokens`, and stay as they are.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/5047 repairs it in 0.19.
    https://github.com/NVIDIA/Megatron-LM/issues/1652 reports it: "aux_loss and z_loss is incorrect
    when use calculate_per_token_loss and cp".

Remove when:
    no supported release multiplies by `activation.shape[0]` alone.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import moe

from ._case import Original, Patch, a_body_has, expect_weight_per_token, target


def forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the router with `moe_aux_loss_coeff` multiplied by TP × CP, the number of ranks that
    share a sequence, if `calculate_per_token_loss` is set and the call has no padding mask. The
    logged loss does not change, because upstream divides it by the same coefficient.
    """
    mask = kwargs.get("padding_mask", args[1] if len(args) > 1 else None)
    factor = _ranks(self) if mask is None else 1
    with moe.multiplied(self.config, "moe_aux_loss_coeff", factor):
        return original(self, *args, **kwargs)


def apply_z_loss(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply the router's z-loss multiplied by TP × CP, the number of ranks that share a sequence.
    This is done only for losses per token. The logged loss does not change, because upstream
    divides it by the coefficient.
    """
    with moe.multiplied(self.config, "moe_z_loss_coeff", _ranks(self)):
        return original(self, *args, **kwargs)


def _ranks(router: Any) -> int:
    return moe.ranks_of_a_sequence() if router.calculate_per_token_loss else 1


def reproduce() -> None:
    """Compare a router's gradient with losses per token and as means, on two tensor-parallel ranks.
    On stock Megatron the auxiliary losses per token have half their weight.
    """
    expect_weight_per_token(tp=2, moe_z_loss_coeff=0.125)


def control() -> list[float]:
    """Return the norm of a router's gradient with a padding mask, as a control.
    Stock Megatron computes it correctly.
    """
    import torch

    from ._routers import ROWS, SEQUENCES, gradient, router, takes_padding

    if not takes_padding():
        return []
    mask = torch.zeros(ROWS, SEQUENCES, dtype=torch.bool, device="cuda")
    mask[ROWS // 2 :] = True
    return [float(gradient(router("aux_loss"), mask).norm())]


PATCH = Patch(
    "per token, MoE auxiliary losses have 1/(TP x CP) of their weight",
    target("moe.router:TopKRouter.forward", forward, "self.routing"),
    target("moe.router:TopKRouter.apply_z_loss", apply_z_loss),
    before="0.19",
    groups=("aux-loss",),
    provides=("aux-losses-count-all-tokens",),
    # The commits that repaired this loss repaired both; the second fragment is of the branch dev.
    fixed_when=a_body_has(
        "z_loss * num_local_tokens * self.tp_cp_group.size()",
        "z_loss_sum * self.config.moe_z_loss_coeff",
    ),
)
