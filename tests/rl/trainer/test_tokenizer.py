"""Tokenizers: one token per word of the data, or what a checkpoint brings."""

import json

import pytest

pytest.importorskip("tokenizers")

from megatron_idempotent.rl.trainer import CheckpointError, DataError
from megatron_idempotent.rl.trainer.task.prompts import SHIPPED_FILE, Prompt, read_prompts
from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer

pytestmark = pytest.mark.full


def shipped():
    return TextTokenizer.of_words(read_prompts(SHIPPED_FILE).all)


def checkpoint(path, tokenizer, config, generation=None):
    """A folder with what a tokenizer is read from."""
    path.mkdir()
    if tokenizer is not None:
        tokenizer.save(path / "tokenizer.json")
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_every_shipped_text_survives_encoding_and_decoding():
    prompts = read_prompts(SHIPPED_FILE)
    tokenizer = TextTokenizer.of_words(prompts.all)
    assert tokenizer.vocabulary_size == 16  # three special, three operations, ten letters
    (answer_id,) = tokenizer.encode_prompt("")
    for prompt in prompts.all:
        ids = tokenizer.encode_prompt(prompt.text)
        assert ids[-1] == answer_id
        assert tokenizer.decode(ids[:-1]) == prompt.text
        whole = tokenizer.encode_answer(prompt.answer)
        assert answer_id not in whole
        assert tokenizer.decode(whole) == prompt.answer


def test_the_order_of_the_data_does_not_change_the_ids():
    prompts = read_prompts(SHIPPED_FILE).all
    texts = [prompt.text for prompt in prompts[:20]]
    forwards, backwards = TextTokenizer.of_words(prompts), TextTokenizer.of_words(prompts[::-1])
    for text in texts:
        assert forwards.encode_prompt(text) == backwards.encode_prompt(text)


def test_a_checkpoint_brings_its_own_tokenizer_and_its_own_ends(tmp_path):
    words = shipped()
    end = words.end_ids[0]
    path = checkpoint(
        tmp_path / "model",
        words,
        {"vocab_size": 20, "eos_token_id": 9},
        {"eos_token_id": [end, 5], "pad_token_id": 0},
    )
    loaded = TextTokenizer.load(path)
    assert loaded.encode_prompt("reverse a b c") == words.encode_prompt("reverse a b c")
    assert (loaded.end_ids, loaded.pad_id, loaded.vocabulary_size) == ((end, 5), 0, 20)
    a = words.encode_prompt("a")[0]
    assert loaded.decode((a, 5, a)) == "a"


def test_a_checkpoint_without_a_padding_token_pads_with_its_end(tmp_path):
    path = checkpoint(tmp_path / "model", shipped(), {"vocab_size": 16, "eos_token_id": 1})
    assert TextTokenizer.load(path).pad_id == 1


@pytest.mark.parametrize(
    ("tokenizer", "config", "says"),
    [
        (False, {"vocab_size": 16, "eos_token_id": 1}, r"tokenizer\.json: .*fast tokenizer"),
        (True, {"vocab_size": 16}, r"config\.json: no eos_token_id, nor in generation_config"),
        (True, {"vocab_size": 15, "eos_token_id": 1}, "16 tokens, and vocab_size is 15"),
        *(
            (True, {"vocab_size": 16, "eos_token_id": 1, key: value}, f"model: {key} is .*, in con")
            for key in ("vocab_size", "eos_token_id", "pad_token_id")
            for value in ("1", -1, 1.5, True, [[1]], {"a": 1}, float("inf"), 2**31)
        ),
        (True, {"eos_token_id": 1}, r"model: vocab_size is \[None\], in config"),
    ],
)
def test_a_checkpoint_that_cannot_serve_is_refused(tmp_path, tokenizer, config, says):
    path = checkpoint(tmp_path / "model", shipped() if tokenizer else None, config)
    with pytest.raises(CheckpointError, match=says):
        TextTokenizer.load(path)


TEMPLATE = (
    "{% for each in messages %}{% if each.role == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}{{ each.role }} {{ each.content }} {{ pad_token }} {% endfor %}"
    "{% if add_generation_prompt %}reverse{% endif %}"
)
CHAT = ({"role": "copy", "content": "a b"}, {"role": "successor", "content": "c"})


def test_messages_go_through_the_checkpoints_chat_template(tmp_path):
    path = checkpoint(tmp_path / "model", shipped(), {"vocab_size": 16, "eos_token_id": 1})
    (path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    with pytest.raises(CheckpointError, match=r"model: no chat template, .* as a string"):
        TextTokenizer.load(path).encode_prompt(CHAT)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = TextTokenizer.load(path)
    # The template's own special tokens, and not those that the tokenizer adds to a text.
    *text, _ = tokenizer.encode_prompt("copy a b <pad> successor c <pad> reverse")
    assert tokenizer.encode_prompt(CHAT) == tuple(text)
    with pytest.raises(DataError, match=r"chat template of .* refuses .*: no tools"):
        tokenizer.encode_prompt(({"role": "tool", "content": "a"},))


def test_decoding_stops_at_the_end_and_shows_other_special_tokens():
    tokenizer = shipped()
    a = tokenizer.encode_prompt("a")[0]
    ids = (a, tokenizer.pad_id, tokenizer.end_ids[0], a)
    assert tokenizer.decode(ids) == "a <pad>"


def test_data_that_uses_a_special_token_is_refused():
    prompt = Prompt(row=0, text="say <end> now", answer="now", split="train")
    with pytest.raises(DataError, match="uses <end> as a word; it is reserved"):
        TextTokenizer.of_words([prompt])
