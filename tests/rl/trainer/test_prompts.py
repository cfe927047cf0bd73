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


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json\n", "bad.jsonl:2: not JSON"),
        ("[1]\n", "bad.jsonl:2: a list; write an object"),
        ("\n", "bad.jsonl:2: an empty line; remove it"),
        ({"prompt": "a", "split": "train"}, "bad.jsonl:2: no field 'answer'"),
        ({**ROW, "prompt": 3}, "bad.jsonl:2: prompt is 3; give a string"),
        ({**ROW, "answer": " "}, "bad.jsonl:2: answer is ' '; give a string that is not empty"),
        ({**ROW, "prompt": "x", "split": "test"}, "split is 'test'; allowed: train or held_out"),
        ({**ROW, "prompt": "x", "finished": 1}, r"fields \['finished'\] are reserved"),
        ({**ROW, "messages": []}, "both 'prompt' and 'messages'; keep one"),
        ({**ROW, "prompt": [{"role": "user", "content": "x"}]}, "give one with --model"),
        ({**ROW, "split": "held_out"}, "prompt 'copy a b' is already on line 1"),
    ],
)
def test_a_malformed_row_is_refused_with_its_line(tmp_path, row, message):
    path = write(tmp_path / "bad.jsonl", [ROW, row])
    with pytest.raises(DataError, match=message):
        read_prompts(path)


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
    ("rows", "message"),
    [
        ([{**ROW, "prompt": []}], "jsonl:1: there are no messages"),
        (
            [{**ROW, "prompt": ["hello"]}],
            "jsonl:1: a message is 'hello'; give an object with 'role'",
        ),
        ([{**ROW, "prompt": [{"role": "user"}]}], "jsonl:1: a message is {'role': 'user'}"),
        ([{**ROW, "prompt": [{"role": "user", "content": [1]}]}], "'role' and 'content', strings"),
        ([{**ROW, "prompt": [*CHAT, {"role": "assistant", "content": "4"}]}], "is the assistant's"),
        ([{**ROW, "prompt": CHAT}, {**ROW, "prompt": CHAT, "split": "held_out"}], "on line 1"),
        ([ROW], "1 rows, none with split 'held_out'; add some"),
        (None, r"bad.jsonl: No such file.* --data"),
    ],
)
def test_a_file_or_messages_that_nothing_can_answer_are_refused(tmp_path, rows, message):
    path = tmp_path / "bad.jsonl"
    if rows is not None:
        write(path, rows)
    with pytest.raises(DataError, match=message):
        read_prompts(path, words=False)


def test_each_pass_takes_every_prompt_once_in_an_order_of_its_own_and_is_counted():
    prompts = read_prompts(SHIPPED_FILE).train[:12]
    stream, again = PromptStream(prompts, seed=1), PromptStream(prompts, seed=1)
    assert [again.prompt(place) for place in range(24)] == list(map(stream.prompt, range(24)))
    assert [stream.epoch(place) for place in range(24)] == [0] * 12 + [1] * 12
    passes = [[stream.prompt(at + place).row for place in range(12)] for at in (0, 12)]
    for taken in passes:
        assert sorted(taken) == sorted(prompt.row for prompt in prompts)
    assert passes[0] != passes[1]
