"""The prompt file: what ships, what is refused, and which rows a rollout takes."""

import json
from collections import Counter

import pytest

from megatron_idempotent.rl.trainer import DataError
from megatron_idempotent.rl.trainer.task.prompts import SHIPPED_FILE, PromptStream, read_prompts

ROW = {"prompt": "copy a b", "answer": "a b", "split": "train"}


def write(path, rows):
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    )
    return path


def test_the_splits_of_the_shipped_file_hold_every_operation():
    prompts = read_prompts(SHIPPED_FILE)
    assert not {p.text for p in prompts.train} & {p.text for p in prompts.held_out}
    assert len(prompts.train) > 2000
    for split in (prompts.train, prompts.held_out):
        operations = Counter(prompt.text.split()[0] for prompt in split)
        assert set(operations) == {"copy", "reverse", "successor"}
        assert min(operations.values()) * 4 > len(split)


@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("{not json\n", "not JSON"),
        ("[1]\n", "list object"),
        ("\n", "empty line"),
        ({"prompt": "a", "split": "train"}, "'answer'"),
        ({**ROW, "prompt": 3}, "prompt 3"),
        ({**ROW, "answer": " "}, "answer ' '"),
        ({**ROW, "prompt": "x", "split": "test"}, "split 'test' train held_out"),
        ({**ROW, "prompt": "x", "finished": 1}, "'finished' reserved"),
        ({**ROW, "messages": []}, "'prompt' 'messages'"),
        ({**ROW, "split": "held_out"}, "'copy a b' line 1"),
    ],
)
def test_a_malformed_row_is_refused_with_its_line(tmp_path, row, named, words):
    told = refused(write(tmp_path / "bad.jsonl", [ROW, row]), words=words)
    assert [word for word in ("bad.jsonl:2:", *named.split()) if word not in told] == []


def refused(path, *, words):
    with pytest.raises(DataError) as caught:
        read_prompts(path, words=words)
    return str(caught.value)


INDENTED = "def double(x):\n  return "


def test_for_a_checkpoints_tokenizer_prompts_and_answers_are_as_in_the_file(tmp_path):
    rows = [
        {"prompt": INDENTED, "answer": " 2 *  x\n", "split": "train"},
        {"prompt": INDENTED.replace("  ", "    "), "answer": "x + x", "split": "held_out"},
    ]
    path = write(tmp_path / "code.jsonl", rows)
    prompts = read_prompts(path, words=False).all
    assert [(each.text, each.answer) for each in prompts] == [
        (row["prompt"], row["answer"]) for row in rows
    ]
    with pytest.raises(DataError, match="is already on line 1"):
        read_prompts(path)  # for words they are one prompt
    one = write(tmp_path / "words.jsonl", [rows[0], {**ROW, "split": "held_out"}])
    assert read_prompts(one).train[0].text == "def double(x): return"


CHAT = [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "  2 + 2?"}]


@pytest.mark.parametrize("name", ["prompt", "messages"])
def test_a_row_may_have_messages_and_fields_for_the_verifier(tmp_path, name):
    row = {name: CHAT, "answer": "4", "split": "train", "tests": ["a", {"b": 1}], "level": 3}
    path = write(tmp_path / "chat.jsonl", [row, {**ROW, "split": "held_out"}])
    (prompt,) = read_prompts(path, words=False).train
    assert prompt.text == tuple(CHAT)
    assert prompt.fields == {"tests": ["a", {"b": 1}], "level": 3}


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([], "no messages"),
        (["hello"], "message 'hello' 'role' 'content'"),
        ([{"role": "user"}], "message {'role': 'user'}"),
        ([{"role": "user", "content": [1]}], "message 'role' 'content'"),
        ([*CHAT, {"role": "assistant", "content": "4"}], "assistant's"),
    ],
)
def test_messages_that_nothing_can_answer_are_refused(tmp_path, prompt, named):
    path = write(tmp_path / "bad.jsonl", [ROW, {**ROW, "prompt": prompt}])
    told = refused(path, words=False)
    assert [word for word in ("bad.jsonl:2:", *named.split()) if word not in told] == []
    assert "--model" in refused(path, words=True)


def test_a_file_that_is_missing_or_has_one_split_or_the_same_chat_twice_is_refused(tmp_path):
    path = tmp_path / "bad.jsonl"
    assert "--data" in refused(path, words=False)
    assert "'held_out'" in refused(write(path, [ROW]), words=False)
    same = [{**ROW, "prompt": CHAT}, {**ROW, "prompt": CHAT, "split": "held_out"}]
    assert "on line 1" in refused(write(path, same), words=False)


def test_each_pass_takes_every_prompt_once_in_an_order_of_its_own_and_is_counted():
    prompts = read_prompts(SHIPPED_FILE).train[:12]
    stream, again = PromptStream(prompts, seed=1), PromptStream(prompts, seed=1)
    assert [again.prompt(place) for place in range(24)] == list(map(stream.prompt, range(24)))
    assert [stream.epoch(place) for place in range(24)] == [0] * 12 + [1] * 12
    passes = [[stream.prompt(at + place).row for place in range(12)] for at in (0, 12)]
    for taken in passes:
        assert sorted(taken) == sorted(prompt.row for prompt in prompts)
    assert passes[0] != passes[1]
