"""The prompt file: what ships, what is refused, and which rows a rollout takes."""

import json
from collections import Counter

import pytest

from megatron_idempotent.trainer.config import DataError
from megatron_idempotent.trainer.task import letters
from megatron_idempotent.trainer.task.prompts import SHIPPED_FILE, read_prompts, rollout_prompts

ROW = {"prompt": "copy a b", "answer": "a b", "split": "train"}


def write(path, rows):
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    )
    return path


def test_the_shipped_file_is_what_its_script_makes():
    assert SHIPPED_FILE.read_bytes() == letters.text().encode()


def test_the_shipped_splits_are_disjoint_and_hold_every_operation():
    prompts = read_prompts(SHIPPED_FILE)
    assert not {p.text for p in prompts.train} & {p.text for p in prompts.held_out}
    assert len(prompts.train) > 2000
    for split in (prompts.train, prompts.held_out):
        operations = Counter(prompt.text.split()[0] for prompt in split)
        assert set(operations) == set(letters.OPERATIONS)
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
        ({**ROW, "prompt": "x", "level": "1"}, r"unknown fields \['level'\]; keep"),
        ({**ROW, "split": "held_out"}, "prompt 'copy a b' is already on line 1"),
    ],
)
def test_a_malformed_row_is_refused_with_its_line(tmp_path, row, message):
    path = write(tmp_path / "bad.jsonl", [ROW, row])
    with pytest.raises(DataError, match=message):
        read_prompts(path)


def test_a_file_without_held_out_rows_is_refused(tmp_path):
    path = write(tmp_path / "half.jsonl", [ROW])
    with pytest.raises(DataError, match="1 rows, none with split 'held_out'; add some"):
        read_prompts(path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"nothing.jsonl: No such file.* --data"):
        read_prompts(tmp_path / "nothing.jsonl")


def test_each_pass_takes_every_prompt_once_in_an_order_of_its_own():
    prompts = read_prompts(SHIPPED_FILE).train[:12]
    passes = []
    for epoch in range(2):
        taken = [
            prompt.row
            for index in range(epoch * 3, epoch * 3 + 3)
            for prompt in rollout_prompts(prompts, index=index, count=4, seed=1)
        ]
        assert sorted(taken) == sorted(prompt.row for prompt in prompts)
        passes.append(taken)
    assert passes[0] != passes[1]


def test_a_rollout_may_cross_the_end_of_the_data():
    prompts = read_prompts(SHIPPED_FILE).train[:5]
    taken = rollout_prompts(prompts, index=1, count=4, seed=1)
    assert len(taken) == 4
    assert taken == rollout_prompts(prompts, index=1, count=4, seed=1)
