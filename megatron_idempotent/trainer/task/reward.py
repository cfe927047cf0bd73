"""Defines the verifier, which says how much of a response is right, and loads others."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Protocol, cast

from megatron_idempotent.trainer.config import ConfigError


class Reward(Protocol):
    """Scores a response from 0 to 1, by its arguments alone; `position_reward` is one."""

    def __call__(self, response: str, answer: str, *, finished: bool) -> float:
        """Return the reward; `finished` is true if the response ended with an end token."""
        ...


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
