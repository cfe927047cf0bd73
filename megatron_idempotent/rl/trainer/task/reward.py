"""Defines the shipped verifier, which scores a response, and loads others."""

from __future__ import annotations

import inspect
import math
from typing import Any, Protocol

from megatron_idempotent.rl.metrics.loggers import import_named
from megatron_idempotent.rl.trainer import ConfigError, DataError

from .prompts import Prompt, PromptSet


class Reward(Protocol):
    """The interface of a verifier: a pure function that scores a response from 0 to 1, such as
    `position_reward`.
    """

    def __call__(self, response: str, answer: str, *, finished: bool, **fields: Any) -> float:
        """Return the reward of a response; `finished` is True if it ended with an end token.

        `fields` are the row's other fields for which the function has parameters.
        """


class Verifier:
    """Calls a reward function with the fields of a data row. The function gets the fields for which
    it has parameters, or all fields if it has `**name`.

    Example: `Verifier(reward).score("c b a", prompt, finished=True)`.
    """

    def __init__(self, reward: Reward) -> None:
        parameters = inspect.signature(reward).parameters.values()
        keywords = [
            parameter
            for parameter in list(parameters)[2:]  # after the response and the answer
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        self._reward = reward
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._names = {parameter.name for parameter in keywords}
        self._needed = {
            parameter.name for parameter in keywords if parameter.default is parameter.empty
        } - {"finished"}

    def score(self, response: str, prompt: Prompt, *, finished: bool) -> float:
        """Return the reward of one response, from 0 to 1.

        Raises:
            ConfigError: the reward is not a number from 0 to 1.
            Exception: the reward function's error.
        """
        value = self._reward(response, prompt.answer, finished=finished, **self._fields(prompt))
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if 0 <= round(number, 9) <= 1:  # rounding may make a sum of fractions exceed 1
            return number
        raise ConfigError(
            f"task.reward returned {value!r} for line {prompt.row + 1} of the prompts and the "
            f"response {response!r}; allowed: a number from 0 to 1"
        )

    def check(self, prompts: PromptSet) -> None:
        """Raise an error unless the reward function accepts the fields of all prompts, and works on
        the first prompt: with the correct answer, and with an empty response.

        Raises:
            DataError: a row lacks a field that the function requires; the message has its line.
            ConfigError: the function does not have the signature of `Reward`, raises for the first
                prompt, or does not return a number from 0 to 1.
        """
        for prompt in prompts.all:
            missing = sorted(self._needed - prompt.fields.keys())
            if missing:
                raise DataError(
                    f"line {prompt.row + 1} of the prompts: no field {missing[0]!r}, which "
                    "task.reward takes without a default; add it, or give the parameter a default"
                )
        prompt = prompts.all[0]
        try:
            inspect.signature(self._reward).bind("", "", finished=True, **self._fields(prompt))
        except TypeError as error:
            raise ConfigError(
                f"task.reward cannot be called as reward(response, answer, finished=…): {error}; "
                "give it these parameters"
            ) from error
        for response, finished in ((prompt.answer, True), ("", False)):
            try:
                self.score(response, prompt, finished=finished)
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"task.reward raises {type(error).__name__} for line {prompt.row + 1} of the "
                    f"prompts and the response {response!r}: {error}"
                ) from error

    def _fields(self, prompt: Prompt) -> dict[str, Any]:
        return {
            name: value
            for name, value in prompt.fields.items()
            if self._takes_all or name in self._names
        }


def position_reward(response: str, answer: str, *, finished: bool) -> float:
    """Return the fraction of a response's word positions that match the answer's. The end of the
    response counts as one more position.

    It is `(right words + right end) / (max(words in response, words in answer) + 1)`, from 0 to 1.
    Only the exact answer, ended after its last word, gets 1.0. Extra words increase the
    denominator, so that guessing after the answer lowers the reward.

    Example: `position_reward("c b x", "c b a", finished=True)` is 0.75.
    """
    response_words, answer_words = response.split(), answer.split()
    right = sum(a == b for a, b in zip(response_words, answer_words, strict=False))
    ended = finished and len(response_words) == len(answer_words)
    return (right + ended) / (max(len(response_words), len(answer_words)) + 1)


def load_reward(path: str) -> Reward:
    """Import and return the reward function at `"package.module:name"`, also from the current
    directory.

    Raises:
        SettingsError: there is no such module or function.
    """
    return import_named(path, "task.reward")
