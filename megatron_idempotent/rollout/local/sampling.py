"""Tokens out of logits.

Shapes: B requests, V vocabulary.
"""

from __future__ import annotations

import torch

from megatron_idempotent.rollout.uniforms import keyed_uniforms

#: Logits that are looked at at once: 4 M of them are 32 MB in float64.
_CHUNK = 1 << 22


def draw(
    logits_BV: torch.Tensor,
    *,
    temperatures_B: torch.Tensor,
    seeds_B: torch.Tensor,
    places_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their log-probs, both [B], int64 and float32.

    Log-probs are natural, of the tempered distribution. The token is where the cumulative
    distribution passes the uniform of (seed, place). Where logits are not finite (-inf is allowed)
    the log-prob is NaN, and the token means nothing.
    """
    uniforms_B = keyed_uniforms(seeds_B=seeds_B, places_B=places_B)
    rows = max(1, _CHUNK // logits_BV.shape[-1])
    drawn = [
        _draw(logits, temperatures, uniforms)
        for logits, temperatures, uniforms in zip(
            *(torch.split(each, rows) for each in (logits_BV, temperatures_B, uniforms_B)),
            strict=True,
        )
    ]
    return torch.cat([tokens for tokens, _ in drawn]), torch.cat([probs for _, probs in drawn])


def _draw(
    logits_BV: torch.Tensor, temperatures_B: torch.Tensor, uniforms_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperatures_B[:, None], dim=-1)
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    # Scaled by the total: probabilities add up to 1 only up to rounding, and a uniform above the
    # total would fall off the end of the vocabulary.
    passed_BV = cumulative_BV <= (uniforms_B * cumulative_BV[:, -1])[:, None]
    tokens_B = passed_BV.sum(-1)
    # One NaN makes all of a row's log-probs NaN.
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]
