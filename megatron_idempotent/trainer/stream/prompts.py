"""The prompts of a run as an endless stream, a function of the place."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_idempotent.trainer.task.prompts import Prompt, prompt_at


class PromptStream:
    """Passes over the data, each in an order of its own. Example: `stream.prompt(0).text`."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        self._prompts = prompts
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        """The prompt at a place from 0."""
        return prompt_at(self._prompts, index, seed=self._seed)

    def epoch(self, index: int) -> int:
        """Returns how often the data was used up before that place."""
        return index // len(self._prompts)
