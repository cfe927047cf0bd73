"""Samples groups of responses for prompts, with any engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_idempotent.rollout import Request, Sample
from megatron_idempotent.trainer.rollout import records
from megatron_idempotent.trainer.rollout.requests import RequestMaker
from megatron_idempotent.trainer.task.prompts import Prompt
from megatron_idempotent.trainer.task.tokenizer import TextTokenizer

Generate = Callable[[Sequence[Request]], Sequence[Sample]]
"""Samples of many requests, in their order. May be collective: then all ranks call it together."""


class EngineSampler:
    """Draws responses, one request for each; a request's seed belongs to it alone.

    A sample is a function of (seed, stream, row of the prompt, index of the sample) and the
    weights: not of the number of ranks, nor, up to the rounding of its logits, of its batch.
    Example: `groups = sampler.sample(prompts, samples=16, stream=0)`.
    """

    def __init__(
        self,
        generate: Generate,
        tokenizer: TextTokenizer,
        *,
        temperature: float,
        max_response_tokens: int,
        seed: int,
    ) -> None:
        self._generate = generate
        self._tokenizer = tokenizer
        self._requests = RequestMaker(
            tokenizer, temperature=temperature, max_response_tokens=max_response_tokens, seed=seed
        )

    def sample(
        self, prompts: Sequence[Prompt], *, samples: int, stream: int
    ) -> tuple[records.Group, ...]:
        """One group of `samples` responses per prompt, in the order of the prompts."""
        requests = [
            request
            for prompt in prompts
            for request in self._requests.make(prompt, stream=stream, samples=samples)
        ]
        answers = self._generate(requests)
        responses = [self._response(answer) for answer in answers]
        return tuple(
            records.Group(
                prompt=prompt,
                prompt_tokens=requests[place * samples].prompt,
                samples=tuple(responses[place * samples : (place + 1) * samples]),
            )
            for place, prompt in enumerate(prompts)
        )

    def _response(self, answer: Sample) -> records.Sample:
        return records.Sample(
            tokens=answer.tokens,
            logprobs=answer.logprobs,
            versions=answer.versions,
            text=self._tokenizer.decode(answer.tokens),
            finished=answer.finish_reason == "stop",
        )
