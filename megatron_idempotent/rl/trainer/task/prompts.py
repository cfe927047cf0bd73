"""Reads prompts from a JSONL file, and orders them into rollouts.

A shipped prompt asks for one of three operations on three letters: copy them, reverse them, or
replace each by its successor among ten letters. There are 3 x 10^3 prompts, in the order of a hash,
so that the first ones are a random sample; another hash holds out one in eight.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from megatron_idempotent.json_text import JsonError, parse_json
from megatron_idempotent.rl.trainer import ConfigError, DataError

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
FIELDS = ("prompt", "answer", "split")
MESSAGES = "messages"
"""Another name of `prompt` in rows with chat messages."""
GIVEN = ("response", "finished")
"""Names of a verifier's arguments, which rows must not have as fields."""
SHIPPED_FILE = Path(__file__).with_name("letters.jsonl")


Messages = tuple[Mapping[str, Any], ...]
"""The messages of a chat, each with a `role` and a `content`, for a chat template."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A row of a prompt file: a prompt, its correct answer, and whether it is for training or for
    evaluations.

    Example: `Prompt(row=0, text="reverse a b c", answer="c b a", split="train")`.
    """

    row: int
    """Index of the row in the file, from 0; the seeds of the prompt's samples depend on it."""
    text: str | Messages
    """The prompt's text, or the messages of a chat."""
    answer: str
    """The correct response."""
    split: Split
    """`train`, or `held_out` for evaluations."""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The row's other fields, for the verifier."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """The training prompts and the held-out prompts of a file. Example:
    `read_prompts(SHIPPED_FILE).held_out[:256]`.
    """

    train: tuple[Prompt, ...]
    """The prompts to train on, in the order of the file."""
    held_out: tuple[Prompt, ...]
    """The prompts for evaluations, in the order of the file."""

    @property
    def all(self) -> tuple[Prompt, ...]:
        """The prompts of both splits, in the order of the file."""
        return tuple(sorted(self.train + self.held_out, key=lambda prompt: prompt.row))


def read_prompts(path: Path, *, words: bool = True) -> PromptSet:
    """Read a JSONL file of prompts; raise `DataError` if a row is invalid, a prompt appears twice,
    or a split is empty.

    With `words`, for a tokenizer with a token per word, blanks in prompts and answers are
    normalized to single ones, and messages are rejected. Otherwise both are unchanged.

    Raises:
        DataError: a line is not JSON, a field is missing, empty or reserved, a prompt appears
            twice, or a split is empty. The message starts with the path and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; give a JSONL file with --data") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8: {error}; save the file as UTF-8") from error
    prompts: list[Prompt] = []
    first_line: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        location = f"{path}:{number}"
        if not line.strip():
            raise DataError(f"{location}: an empty line; remove it")
        prompt = _parse_row(line, row=number - 1, location=location, words=words)
        text = prompt.text if isinstance(prompt.text, str) else json.dumps(prompt.text)
        if text in first_line:
            raise DataError(
                f"{location}: prompt {text!r} is already on line {first_line[text]}; "
                "keep one of the two, so that no held-out prompt is trained on"
            )
        first_line[text] = number
        prompts.append(prompt)
    return PromptSet(
        train=_split(prompts, "train", path), held_out=_split(prompts, "held_out", path)
    )


def check_answers_fit(
    prompts: PromptSet, encode_answer: Callable[[str], Sequence[int]], *, max_response_tokens: int
) -> None:
    """Raise `ConfigError` if a prompt's answer, with the end token, exceeds `max_response_tokens`.

    `encode_answer` returns the tokens of a complete response.

    Raises:
        ConfigError: an answer does not fit; the message has the required value.
    """
    lengths = {prompt.answer: len(encode_answer(prompt.answer)) for prompt in prompts.all}
    longest = max(lengths, key=lambda answer: lengths[answer])
    if lengths[longest] > max_response_tokens:
        raise ConfigError(
            f"rollout.max_response_tokens is {max_response_tokens}; allowed: {lengths[longest]} or "
            f"more, for the answer {longest!r} and its end token"
        )


class PromptStream:
    """Implements `controller.Prompts`: repeats the data endlessly, in a new order in every epoch.

    The prompt at an index depends only on the data and the seed, so that a resumed run needs only
    the index. Example: `stream.prompt(0).text`.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        self._prompts = prompts
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at an index, from 0, of the endless sequence of prompts."""
        position = index % len(self._prompts)
        return self._prompts[
            _epoch_order(len(self._prompts), self.epoch(index), self._seed)[position]
        ]

    def epoch(self, index: int) -> int:
        """Return the number of complete passes over the prompts before the prompt at an index."""
        return index // len(self._prompts)


@functools.lru_cache(maxsize=4)
def _epoch_order(count: int, epoch: int, seed: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(f"prompts {seed} {epoch}").shuffle(order)
    return tuple(order)


def _parse_row(line: str, *, row: int, location: str, words: bool) -> Prompt:
    try:
        fields = parse_json(line)
    except JsonError as error:
        raise DataError(f"{location}: not JSON: {error}; write one object per line") from error
    if not isinstance(fields, dict):
        raise DataError(f"{location}: a {type(fields).__name__}; write an object with {FIELDS}")
    if MESSAGES in fields:
        if "prompt" in fields:
            raise DataError(f"{location}: both 'prompt' and {MESSAGES!r}; keep one of them")
        fields["prompt"] = fields.pop(MESSAGES)
    text: Any = fields.get("prompt")
    is_chat = isinstance(text, list)
    if is_chat and words:
        raise DataError(
            f"{location}: the prompt is messages, which need the chat template of a "
            "checkpoint's tokenizer; give one with --model, or write the prompt as a string"
        )
    if is_chat:
        _check_messages(text, location)
    _check_fields(fields, location, ("answer", "split") if is_chat else FIELDS)
    text, answer = tuple(text) if is_chat else text, fields["answer"]
    if words:
        text, answer = (" ".join(value.split()) for value in (text, answer))
    return Prompt(
        row=row,
        text=text,
        answer=answer,
        split=cast("Split", fields["split"]),
        fields={name: value for name, value in fields.items() if name not in FIELDS},
    )


def _check_fields(fields: dict[str, Any], location: str, texts: Sequence[str]) -> None:
    for name in texts:
        if name not in fields:
            raise DataError(f"{location}: no field {name!r}, found {sorted(fields)}; add it")
        if not isinstance(fields[name], str) or not fields[name].strip():
            raise DataError(
                f"{location}: {name} is {fields[name]!r}; give a string that is not empty"
            )
    if fields["split"] not in SPLITS:
        raise DataError(f"{location}: split is {fields['split']!r}; allowed: {' or '.join(SPLITS)}")
    reserved = sorted(set(fields) & set(GIVEN))
    if reserved:
        raise DataError(
            f"{location}: fields {reserved} are reserved for the verifier's arguments; rename"
        )


def _check_messages(messages: list[Any], location: str) -> None:
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(name), str) for name in ("role", "content")
        ):
            raise DataError(
                f"{location}: a message is {message!r}; give an object with 'role' and 'content', "
                "strings"
            )
    if not messages or messages[-1]["role"] == "assistant":
        fact = "there are no messages" if not messages else "the last message is the assistant's"
        raise DataError(f"{location}: {fact}; end with a message that the assistant answers")


def _split(prompts: Sequence[Prompt], split: Split, path: Path) -> tuple[Prompt, ...]:
    rows = tuple(prompt for prompt in prompts if prompt.split == split)
    if not rows:
        raise DataError(f"{path}: {len(prompts)} rows, none with split {split!r}; add some")
    return rows
