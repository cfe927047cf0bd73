"""Defines the verifier, which says how much of a response is right, and loads others."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from megatron_idempotent.rl.trainer import ConfigError, DataError

from .prompts import Prompt, PromptSet


class Reward(Protocol):
    """Scores a response from 0 to 1, by its arguments alone; `position_reward` is one."""

    def __call__(self, response: str, answer: str, *, finished: bool, **fields: Any) -> float:
        """Return the reward; `finished` is true if the response ended with an end token.

        `fields` are those of the row's other fields that the function has parameters for.
        """


class FieldsOf:
    """Chooses the fields of a row that a verifier takes; with `**name` it takes all of them.

    Example: `FieldsOf(reward)(prompt.fields)`.
    """

    def __init__(self, reward: Reward) -> None:
        parameters = inspect.signature(reward).parameters.values()
        self._all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        named = [
            each
            for each in list(parameters)[2:]  # after the response and the answer
            if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
        self._names = frozenset(each.name for each in named)
        self._needed = {each.name for each in named if each.default is each.empty} - {"finished"}

    def __call__(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return these fields."""
        return {name: each for name, each in fields.items() if self._all or name in self._names}

    def check(self, prompts: PromptSet) -> None:
        """Check that each row has what the verifier needs. Errors: `DataError`, with the line."""
        for prompt in prompts.all:
            missing = sorted(self._needed - prompt.fields.keys())
            if missing:
                raise DataError(
                    f"line {prompt.row + 1} of the prompts: no field {missing[0]!r}, which "
                    "task.reward takes without a default; add it, or give the parameter a default"
                )


def check_reward(reward: Reward, prompts: PromptSet) -> None:
    """Check a verifier's parameters against the rows, and two calls of it: right, and empty.

    Errors: `DataError` for a row without a field that it needs; `ConfigError` if it cannot be
    called as `Reward` says, raises for the first prompt, or does not return a number from 0 to 1.
    """
    fields, prompt = FieldsOf(reward), prompts.all[0]
    fields.check(prompts)
    try:
        inspect.signature(reward).bind("", "", finished=True, **fields(prompt.fields))
    except TypeError as error:
        raise ConfigError(
            f"task.reward cannot be called as reward(response, answer, finished=…): {error}; give "
            "it these parameters"
        ) from error
    for response, finished in ((prompt.answer, True), ("", False)):
        try:
            score(reward, response, prompt, finished=finished, fields=fields(prompt.fields))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"task.reward raises {type(error).__name__} for line {prompt.row + 1} of the "
                f"prompts and the response {response!r}: {error}"
            ) from error


def score(
    reward: Reward, response: str, prompt: Prompt, *, finished: bool, fields: Mapping[str, Any]
) -> float:
    """Return a verifier's reward. Errors: `ConfigError` if it is no number from 0 to 1."""
    value = reward(response, prompt.answer, finished=finished, **fields)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if 0 <= round(number, 9) <= 1:  # a sum of shares may be an ulp above 1
        return number
    raise ConfigError(
        f"task.reward returned {value!r} for line {prompt.row + 1} of the prompts and the response "
        f"{response!r}; allowed: a number from 0 to 1"
    )


def position_reward(response: str, answer: str, *, finished: bool) -> float:
    """Return the share of positions that are right; the response's end counts as a position.

    It is `(right words + right end) / (max(words in response, words in answer) + 1)`, from 0 to 1.
    Only the whole answer, ended after its last word, gets 1.0. A response that is too long or too
    short has more positions than it can have right, so that guesses after the answer cost reward.

    Example: `position_reward("c b x", "c b a", finished=True)` is 0.75.
    """
    given, wanted = response.split(), answer.split()
    right = sum(a == b for a, b in zip(given, wanted, strict=False))
    ended = finished and len(given) == len(wanted)
    return (right + ended) / (max(len(given), len(wanted)) + 1)


def import_from_here() -> None:
    """Put the current directory on `sys.path`, where a console script does not have it."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def load_reward(path: str) -> Reward:
    """Import the function at `"package.module:name"`, also from the current directory.

    Errors: `ConfigError` if there is no such module, or no such function in it.
    """
    module_name, colon, name = path.partition(":")
    if not colon:
        raise ConfigError(f"task.reward is {path!r}; write it as package.module:function")
    import_from_here()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task.reward is {path!r}; {error}; install it, or run where its file is"
        ) from error
    reward = getattr(module, name, None)
    if not callable(reward):
        raise ConfigError(f"task.reward is {path!r}; {module_name} has no function {name!r}")
    return cast("Reward", reward)
