"""One token per word, from the data."""

import pytest

pytest.importorskip("tokenizers")

from megatron_idempotent.trainer.errors import DataError
from megatron_idempotent.trainer.task.prompts import SHIPPED_FILE, Prompt, read_prompts
from megatron_idempotent.trainer.task.tokenizer import WordTokenizer


def test_every_shipped_text_survives_encoding_and_decoding():
    prompts = read_prompts(SHIPPED_FILE)
    tokenizer = WordTokenizer.build(prompts.all)
    assert tokenizer.vocabulary_size == 16  # three special, three operations, ten letters
    for prompt in prompts.all:
        ids = tokenizer.encode_prompt(prompt.text)
        assert ids[-1] == tokenizer.answer_id
        assert tokenizer.decode(ids[:-1]) == prompt.text
        assert tokenizer.decode(tokenizer.encode_answer(prompt.answer)) == prompt.answer


def test_the_order_of_the_data_does_not_change_the_ids():
    prompts = read_prompts(SHIPPED_FILE).all
    texts = [prompt.text for prompt in prompts[:20]]
    forwards, backwards = WordTokenizer.build(prompts), WordTokenizer.build(prompts[::-1])
    for text in texts:
        assert forwards.encode_prompt(text) == backwards.encode_prompt(text)


def test_a_saved_tokenizer_encodes_the_same(tmp_path):
    tokenizer = WordTokenizer.build(read_prompts(SHIPPED_FILE).all)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = WordTokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.encode_prompt("reverse a b c") == tokenizer.encode_prompt("reverse a b c")
    assert loaded.end_id == tokenizer.end_id


def test_decoding_stops_at_the_end_and_shows_other_special_tokens():
    tokenizer = WordTokenizer.build(read_prompts(SHIPPED_FILE).all)
    a = tokenizer.encode_prompt("a")[0]
    ids = (a, tokenizer.pad_id, tokenizer.end_id, a)
    assert tokenizer.decode(ids) == "a <pad>"


def test_data_that_uses_a_special_token_is_refused():
    prompt = Prompt(row=0, text="say <end> now", answer="now", split="train")
    with pytest.raises(DataError, match="uses <end> as a word; it is reserved"):
        WordTokenizer.build([prompt])
