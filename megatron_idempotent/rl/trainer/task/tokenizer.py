"""Converts text to token ids and back, with a checkpoint's tokenizer or a token per word."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from megatron_idempotent.json_text import parse_json
from megatron_idempotent.rl.trainer import CheckpointError, DataError
from megatron_idempotent.rl.trainer.config import Config

from .prompts import Messages, Prompt, PromptSet

TOKENIZER_FILE = "tokenizer.json"
PAD, END, ANSWER = "<pad>", "<end>", "<answer>"
SPECIAL = (PAD, END, ANSWER)


class TextTokenizer:
    """Converts text to token ids and back, and has the ids of the tokens that end a response, and
    of the padding token.

    Example: `TextTokenizer.load(Path("checkpoints/Qwen3-0.6B")).encode_prompt("2 + 3 =")`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        end_ids: tuple[int, ...],
        pad_id: int,
        vocabulary_size: int,
        checkpoint: Path | None = None,
    ) -> None:
        """Take a tokenizer and its special ids. The chat template in `checkpoint` is loaded when a
        chat is first encoded.
        """
        self._tokenizer = tokenizer
        self._checkpoint = checkpoint
        self.end_ids = end_ids
        self.pad_id = pad_id
        self.vocabulary_size = vocabulary_size

    @classmethod
    def load(cls, checkpoint: Path) -> TextTokenizer:
        """Load the tokenizer of a Hugging Face checkpoint, `tokenizer.json`, and the end and
        padding ids in its configuration.

        Raises:
            CheckpointError: a file is missing or lacks something; the message names both.
        """
        path = checkpoint / TOKENIZER_FILE
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise CheckpointError(
                f"{path}: {error}; give a checkpoint with a tokenizer of `tokenizers`, as "
                "save_pretrained of a fast tokenizer writes it"
            ) from error
        config = _read(checkpoint / "config.json")
        generation = checkpoint / "generation_config.json"
        fields = config | (_read(generation) if generation.is_file() else {})
        ends = fields.get("eos_token_id")
        if ends is None or ends == []:
            raise CheckpointError(
                f"{checkpoint / 'config.json'}: no eos_token_id, nor in generation_config.json; "
                "add the token that ends a response"
            )
        end_ids = _numbers(checkpoint, "eos_token_id", ends)
        (size,) = _numbers(checkpoint, "vocab_size", [config.get("vocab_size")])
        if tokenizer.get_vocab_size() > size:
            raise CheckpointError(
                f"{path}: {tokenizer.get_vocab_size()} tokens, and vocab_size is {size} in "
                "config.json; the two are not of one model"
            )
        pad = fields.get("pad_token_id")
        (pad_id,) = _numbers(checkpoint, "pad_token_id", [end_ids[0] if pad is None else pad])
        return cls(
            tokenizer, end_ids=end_ids, pad_id=pad_id, vocabulary_size=size, checkpoint=checkpoint
        )

    @classmethod
    def of_words(cls, prompts: Iterable[Prompt]) -> TextTokenizer:
        """Make a tokenizer with one token for each word in the prompts and answers.

        Ids are in alphabetical order, so that they do not depend on the order of prompts. Prompts
        end with `<answer>`, responses with `<end>`.

        Raises:
            DataError: a special token is a word of the data.
        """
        words: set[str] = set()
        for prompt in prompts:
            assert isinstance(prompt.text, str), "read_prompts() refuses messages for words"
            words.update(prompt.text.split(), prompt.answer.split())
        for token in SPECIAL:
            if token in words:
                raise DataError(f"the data uses {token} as a word; it is reserved, rename it")
        vocabulary = {word: number for number, word in enumerate((*SPECIAL, *sorted(words)))}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {ANSWER}", special_tokens=[(ANSWER, vocabulary[ANSWER])]
        )
        return cls(
            tokenizer,
            end_ids=(vocabulary[END],),
            pad_id=vocabulary[PAD],
            vocabulary_size=len(vocabulary),
        )

    def save(self, path: Path) -> None:
        """Write the tokenizer as a JSON file, for `tokenizers` and Hugging Face."""
        self._tokenizer.save(str(path))

    def encode_prompt(self, text: str | Messages) -> tuple[int, ...]:
        """Return the token ids of a prompt, which is a text or a list of chat messages, including
        special tokens.

        Messages are formatted with the checkpoint's chat template, which has its own special
        tokens, up to the beginning of the assistant's answer.

        Raises:
            CheckpointError: the checkpoint has no chat template.
            DataError: the template rejects the messages.
        """
        if isinstance(text, str):
            return tuple(self._tokenizer.encode(text).ids)
        import jinja2

        try:
            rendered = self._chat.apply_chat_template(
                [dict(message) for message in text], tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise DataError(
                f"the chat template of {self._checkpoint} refuses {list(text)}: {error}"
            ) from error
        return tuple(self._tokenizer.encode(rendered, add_special_tokens=False).ids)

    @functools.cached_property
    def _chat(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        chat = self._checkpoint and PreTrainedTokenizerFast.from_pretrained(self._checkpoint)
        if not chat or not chat.chat_template:
            raise CheckpointError(
                f"{self._checkpoint}: no chat template, neither chat_template.jinja nor in "
                "tokenizer_config.json, and the data has messages; add it, or write each prompt as "
                "a string"
            )
        return chat

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a complete response: `text` and an end token."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return (*ids, self.end_ids[0])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a response up to its first end token.

        Special tokens are kept: a verifier must see a `<pad>` that the policy sampled.
        """
        ends = [index for index, number in enumerate(ids) if number in self.end_ids]
        text: str = self._tokenizer.decode(list(ids[: ends[0]] if ends else ids), False)
        return text.strip()


def make_tokenizer(config: Config, prompts: PromptSet) -> TextTokenizer:
    """Load the tokenizer of `model.path`; without a path, make one with a token per word of the
    prompts.
    """
    if config.model.path:
        return TextTokenizer.load(Path(config.model.path))
    return TextTokenizer.of_words(prompts.all)


def longest_sequence(config: Config, prompts: PromptSet, tokenizer: TextTokenizer) -> int:
    """Return the most tokens that a sequence can have: those of the longest prompt, plus
    `rollout.max_response_tokens`.

    Held-out prompts are included, so that evaluation and training have the same rotary table.
    """
    longest = max(len(tokenizer.encode_prompt(prompt.text)) for prompt in prompts.all)
    return longest + config.rollout.max_response_tokens


def _numbers(checkpoint: Path, key: str, value: Any) -> tuple[int, ...]:
    numbers = value if isinstance(value, list) else [value]
    if not all(type(number) is int and 0 <= number < 2**31 for number in numbers):
        raise CheckpointError(
            f"{checkpoint}: {key} is {str(value)[:80]}, in config.json or generation_config.json; "
            "give a whole number from 0"
        )
    return tuple(numbers)


def _read(path: Path) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = dict(parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}; give the folder of a checkpoint") from error
    return fields
