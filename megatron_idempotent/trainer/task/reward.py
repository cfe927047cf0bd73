"""The verifier: how much of a response is right. A pure function of strings."""

from __future__ import annotations


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
