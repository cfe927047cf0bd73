"""Sampling through Megatron's own key-value cache, in the process that trains.

Shapes: B sequences, P prompt tokens, T response positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron_idempotent.trainer.policy.forward import causal_mask
from megatron_idempotent.trainer.rollout.records import Group, Sample
from megatron_idempotent.rollout.uniforms import token_uniforms
from megatron_idempotent.trainer.task.prompts import Prompt
from megatron_idempotent.trainer.task.tokenizer import WordTokenizer


class CachedSampler:
    """Draws responses from the current weights of a policy.

    `weights` is asked for the module at every call, so none are ever held back from an update; it
    may be collective, so all ranks sample at the same point, with or without prompts. Each
    sample has its own random numbers (see `token_uniforms`): it does not depend on the other
    samples of the batch, except through the rounding of the logits.
    Example: `groups = sampler.sample(prompts, samples=16, stream=0)`.
    """

    def __init__(
        self,
        weights: Callable[[], AbstractContextManager[Any]],
        tokenizer: WordTokenizer,
        *,
        temperature: float,
        max_response_tokens: int,
        seed: int,
    ) -> None:
        self._weights = weights
        self._tokenizer = tokenizer
        self._temperature = temperature
        self._max_response_tokens = max_response_tokens
        self._seed = seed

    def sample(self, prompts: Sequence[Prompt], *, samples: int, stream: int) -> tuple[Group, ...]:
        """One group of `samples` responses per prompt, in the order of the prompts."""
        encoded = [self._tokenizer.encode_prompt(prompt.text) for prompt in prompts]
        by_length: dict[int, list[int]] = {}
        for number, tokens in enumerate(encoded):
            by_length.setdefault(len(tokens), []).append(number)
        groups: dict[int, Group] = {}
        # One batch per prompt length: the static cache has one offset for all of its sequences, and
        # it attends to every position it holds, padding too.
        with self._weights() as module:
            for numbers in by_length.values():
                responses = self._responses(
                    module,
                    torch.tensor([encoded[n] for n in numbers for _ in range(samples)]),
                    rows_B=torch.tensor([prompts[n].row for n in numbers]).repeat_interleave(
                        samples
                    ),
                    samples_B=torch.arange(samples).repeat(len(numbers)),
                    stream=stream,
                )
                for place, number in enumerate(numbers):
                    groups[number] = Group(
                        prompt=prompts[number],
                        prompt_tokens=encoded[number],
                        samples=tuple(responses[place * samples : (place + 1) * samples]),
                    )
        return tuple(groups[number] for number in range(len(prompts)))

    def _responses(
        self,
        module: Any,
        prompt_BP: torch.Tensor,
        *,
        rows_B: torch.Tensor,
        samples_B: torch.Tensor,
        stream: int,
    ) -> list[Sample]:
        uniforms_BT = token_uniforms(
            seed=self._seed,
            stream=stream,
            rows_B=rows_B,
            samples_B=samples_B,
            tokens=self._max_response_tokens,
        )
        tokens_BT, logprobs_BT = generate(
            module,
            prompt_BP,
            uniforms_BT,
            temperature=self._temperature,
            end_id=self._tokenizer.end_id,
        )
        return [
            self._finish(tokens, logprobs)
            for tokens, logprobs in zip(tokens_BT.tolist(), logprobs_BT.tolist(), strict=True)
        ]

    def _finish(self, tokens: list[int], logprobs: list[float]) -> Sample:
        """Cut a row at its end token: what was generated behind it is not part of the response."""
        finished = self._tokenizer.end_id in tokens
        length = tokens.index(self._tokenizer.end_id) + 1 if finished else len(tokens)
        return Sample(
            tokens=tuple(tokens[:length]),
            logprobs=tuple(logprobs[:length]),
            text=self._tokenizer.decode(tokens[:length]),
            finished=finished,
        )


def generate(
    module: Any,
    prompt_BP: torch.Tensor,
    uniforms_BT: torch.Tensor,
    *,
    temperature: float,
    end_id: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their log-probs, both [B, T], continued from prompts of one length.

    `uniforms_BT` in [0, 1) decides the tokens: token t is where the cumulative distribution passes
    `uniforms_BT[:, t]`. Behind an end token rows are meaningless; the loop stops early, leaving
    end tokens, when every row has ended. The module is in eval mode and records no gradient, as
    `Policy.weights()` hands it out.
    """
    from megatron.core.inference.contexts import StaticInferenceContext

    rows, prompt_length = prompt_BP.shape
    positions = uniforms_BT.shape[1]
    tokens_BT = torch.full((rows, positions), end_id, dtype=torch.int64)
    logprobs_BT = torch.zeros(rows, positions)
    ended_B = torch.zeros(rows, dtype=torch.bool)
    context = StaticInferenceContext(rows, prompt_length + positions)
    given_BP = prompt_BP
    for step in range(positions):
        logprobs_BV = _next_logprobs(module, given_BP, context, temperature)
        token_B = _inverse_cdf(logprobs_BV, uniforms_BT[:, step])
        tokens_BT[:, step] = token_B
        logprobs_BT[:, step] = logprobs_BV.gather(-1, token_B[:, None])[:, 0]
        ended_B |= token_B == end_id
        if bool(ended_B.all()):
            break
        given_BP = token_B[:, None]
    return tokens_BT, logprobs_BT


def _next_logprobs(
    module: Any, given_BP: torch.Tensor, context: Any, temperature: float
) -> torch.Tensor:
    """Log-probs [B, V] of the next token; `context` remembers all that was given before."""
    start, length = context.sequence_len_offset, given_BP.shape[1]
    position_ids_BP = torch.arange(start, start + length).expand_as(given_BP)
    mask = causal_mask(length) if start == 0 else None  # one new token may see all of the cache
    logits_BPV = module(
        given_BP,
        position_ids_BP,
        mask,
        inference_context=context,
        runtime_gather_output=True,  # 0.17 refuses to guess it for inference
    )
    context.sequence_len_offset += length
    context.enable_decode_mode()
    return torch.log_softmax(logits_BPV[:, -1].float() / temperature, dim=-1)


def _inverse_cdf(logprobs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative distribution passes each uniform; float64, as they are."""
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    # Scaled by the total: probabilities add up to 1 only up to rounding, and a uniform above the
    # total would fall off the end of the vocabulary.
    passed_BV = cumulative_BV <= (uniform_B * cumulative_BV[:, -1])[:, None]
    return passed_BV.sum(-1)
