"""One token per word, with a vocabulary made from the prompt file itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_idempotent.trainer.errors import DataError
from megatron_idempotent.trainer.task.prompts import Prompt

PAD, END, ANSWER = "<pad>", "<end>", "<answer>"
SPECIAL = (PAD, END, ANSWER)


class WordTokenizer:
    """A `tokenizers` word-level tokenizer. Prompts end in `<answer>`, responses in `<end>`.

    Example: `WordTokenizer.build(prompts).encode_prompt("copy a b c")` is five token ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocabulary_size: int = tokenizer.get_vocab_size()
        self.pad_id, self.end_id, self.answer_id = (self._special(token) for token in SPECIAL)

    @classmethod
    def build(cls, prompts: Iterable[Prompt]) -> WordTokenizer:
        """Words in alphabetical order: the same prompts in any order give the same ids.

        Errors: `DataError` where a special token appears as a word of the data.
        """
        words: set[str] = set()
        for prompt in prompts:
            words.update(prompt.text.split(), prompt.answer.split())
        for token in SPECIAL:
            if token in words:
                raise DataError(f"the data uses {token} as a word; it is reserved, rename it")
        vocabulary = {word: number for number, word in enumerate((*SPECIAL, *sorted(words)))}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> WordTokenizer:
        """The tokenizer that `save` wrote."""
        return cls(Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        """Write the tokenizer as the JSON file that `tokenizers` and Hugging Face read."""
        self._tokenizer.save(str(path))

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt, `<answer>` last."""
        return (*self._tokenizer.encode(text).ids, self.answer_id)

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """Token ids of a whole response that says `text`, `<end>` last."""
        return (*self._tokenizer.encode(text).ids, self.end_id)

    def decode(self, ids: Sequence[int]) -> str:
        """The words of a response up to its `<end>`, special tokens in the middle spelled out.

        They stay visible on purpose: a verifier must see a `<pad>` that the policy produced.
        """
        ids = list(ids)
        if self.end_id in ids:
            ids = ids[: ids.index(self.end_id)]
        return " ".join(str(self._tokenizer.id_to_token(number)) for number in ids)

    def _special(self, token: str) -> int:
        number: int | None = self._tokenizer.token_to_id(token)
        assert number is not None, f"a tokenizer without {token}: build() makes one with it"
        return number
