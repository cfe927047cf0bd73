"""Makes the prompts that ship: `python -m megatron_idempotent.rl.trainer.task.letters`.

A prompt asks for one of three operations on three letters: copy them, reverse them, or replace each
by its successor among the ten. There are 3 x 10^3 prompts. A hash of the prompt decides its split,
so that the split does not depend on the order of prompts, and no prompt is in both.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

LETTERS = "abcdefghij"
LENGTH = 3
HELD_OUT_ONE_IN = 8


def _successor(letters: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)] for letter in letters)


OPERATIONS: dict[str, Callable[[tuple[str, ...]], tuple[str, ...]]] = {
    "copy": lambda letters: letters,
    "reverse": lambda letters: letters[::-1],
    "successor": _successor,
}


def rows() -> Iterator[dict[str, str]]:
    """Yield all rows in the order of a hash, so that the first rows are a fair sample of all."""

    def digest(item: tuple[str, tuple[str, ...]]) -> bytes:
        return hashlib.sha256(" ".join((item[0], *item[1])).encode()).digest()

    strings = itertools.product(LETTERS, repeat=LENGTH)
    for operation, letters in sorted(itertools.product(OPERATIONS, strings), key=digest):
        held_out = digest((operation, letters))[-1] % HELD_OUT_ONE_IN == 0
        yield {
            "prompt": " ".join((operation, *letters)),
            "answer": " ".join(OPERATIONS[operation](letters)),
            "split": "held_out" if held_out else "train",
        }


def text() -> str:
    """Return the content of the file: one JSON object per line."""
    return "".join(json.dumps(row) + "\n" for row in rows())


def main() -> None:
    """Write `letters.jsonl` beside this file."""
    Path(__file__).with_name("letters.jsonl").write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
