"""Makes the requests of a prompt's samples."""

from __future__ import annotations

import hashlib

from megatron_idempotent.rollout import Request
from megatron_idempotent.trainer.config import Config
from megatron_idempotent.trainer.task.prompts import Prompt
from megatron_idempotent.trainer.task.tokenizer import TextTokenizer


class RequestMaker:
    """Makes requests whose seeds belong to them alone.

    A request is a function of (seed, stream, row of the prompt, index of the sample).
    Example: `maker.make(prompt, stream=0, samples=16)`.
    """

    def __init__(
        self, tokenizer: TextTokenizer, *, temperature: float, max_response_tokens: int, seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._temperature = temperature
        self._max_response_tokens = max_response_tokens
        self._seed = seed

    @classmethod
    def of(cls, config: Config, tokenizer: TextTokenizer) -> RequestMaker:
        """Makes one from the configuration."""
        return cls(
            tokenizer,
            temperature=config.rollout.temperature,
            max_response_tokens=config.rollout.max_response_tokens,
            seed=config.run.seed,
        )

    def make(self, prompt: Prompt, *, stream: int, samples: int) -> list[Request]:
        """One request per sample. `stream` names the random numbers."""
        tokens = self._tokenizer.encode_prompt(prompt.text)
        return [
            self._request(f"{stream}/{prompt.row}/{sample}", tokens) for sample in range(samples)
        ]

    def _request(self, name: str, tokens: tuple[int, ...]) -> Request:
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        return Request(
            id=name,
            prompt=tokens,
            max_tokens=self._max_response_tokens,
            stop_tokens=self._tokenizer.end_ids,
            temperature=self._temperature,
            seed=int.from_bytes(digest, "big") >> 1,  # engines take what fits into int64
        )
