"""The verifier: how much of a response is right. A pure function of strings."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Protocol, cast

from megatron_idempotent.trainer.config import ConfigError


class Reward(Protocol):
    """Judges a response; `position_reward` is one. Pure, and from 0 to 1."""

    def __call__(self, response: str, answer: str, *, finished: bool) -> float:
        """The reward. `finished` says that the response ended by itself."""
        ...


def position_reward(response: str, answer: str, *, finished: bool) -> float:
    """Share of positions that are right, the end of the response counting as one more position.

    `(right words + right end) / (max(words in response, words in answer) + 1)`, from 0 to 1. It is
    1.0 for the whole answer, ended in time, and nothing else. A response that is too long or too
    short has a larger denominator than it can fill, so padding with guesses never pays.

    Example: `position_reward("c b x", "c b a", finished=True)` is 0.75.
    """
    given, wanted = response.split(), answer.split()
    right = sum(a == b for a, b in zip(given, wanted, strict=False))
    ended = finished and len(given) == len(wanted)
    return (right + ended) / (max(len(given), len(wanted)) + 1)


def import_from_here() -> None:
    """Let modules in the current directory be imported: a console script does not look there."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def load_reward(path: str) -> Reward:
    """The function at `"package.module:name"`; modules in the current directory count.

    Errors: `ConfigError` where there is no such module or no such function in it.
    """
    module_name, colon, name = path.partition(":")
    if not colon:
        raise ConfigError(f"task.reward is {path!r}; write it as package.module:function")
    import_from_here()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"task.reward is {path!r}; {error}") from error
    reward = getattr(module, name, None)
    if not callable(reward):
        raise ConfigError(f"task.reward is {path!r}; {module_name} has no function {name!r}")
    return cast("Reward", reward)
