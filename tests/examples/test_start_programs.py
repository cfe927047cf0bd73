"""The programs of examples/ say what they promise."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_idempotent.patching.decide import installed
from megatron_idempotent.proof import cpu

EXAMPLES = Path(__file__).parents[2] / "examples"
found = installed("megatron-core")
if found is None:
    pytest.skip("the programs run Megatron", allow_module_level=True)
#: By program: the lines that it prints. The ranks of this session serve, which costs no start.
SAID = {
    "train_twice": [
        "stock:   AssertionError: When overlap_grad_reduce is True, config.no_sync_func must be "
        "None; a custom no_sync_func is not supported when overlapping grad-reduce",
        "patched: three calls of train(2) have the same bits as one of train(6)",
    ],
    "packed_logprobs": ["both ranks have the same bits"],
    "split_step": [],
}
#: An engine has eight methods.
LONGEST = {"sglang_engine": 200}


def said_by(name, monkeypatch, pool, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(cpu, "run_ranks", pool.run)
    importlib.import_module(name).main()
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_a_program_is_a_page_long_and_in_the_documentation(path):
    assert len(path.read_text("utf-8").splitlines()) <= LONGEST.get(path.stem, 80)
    pages = ("index.md", "frameworks.md", "rollouts.md", "train-step.md")
    docs = "".join((EXAMPLES.parent / "docs" / page).read_text("utf-8") for page in pages)
    assert f"(../examples/{path.name})" in docs


@pytest.mark.parametrize("name", SAID)
def test_a_program_says_what_it_promises(name, monkeypatch, megatron_rank_pool, capsys):
    if name == "train_twice" and found.release < (0, 17):
        pytest.skip("wheels before 0.17 carry no megatron.training")
    lines = said_by(name, monkeypatch, megatron_rank_pool, capsys)
    assert [line for line in lines if line in SAID[name]] == SAID[name], lines


def test_packed_logprobs_are_those_of_the_sequences_alone(monkeypatch, megatron_rank_pool, capsys):
    *lines, _ = said_by("packed_logprobs", monkeypatch, megatron_rank_pool, capsys)
    for line in lines:
        shared, alone = (float(word) for word in line.split() if "." in word)
        assert abs(shared - alone) < 2e-4  # four decimals are printed


def test_a_split_step_has_one_norm(monkeypatch, megatron_rank_pool, capsys):
    lines = said_by("split_step", monkeypatch, megatron_rank_pool, capsys)
    assert len(lines) == 3
    assert len({line.split()[-1] for line in lines}) == 1


def test_staged_weights_draw_no_token_before_the_switch(monkeypatch, megatron_rank_pool, capsys):
    _, *lines = said_by("weight_sync", monkeypatch, megatron_rank_pool, capsys)
    found = [re.fullmatch(r"(.*?) +\d+ of version (\d), (\S+) off", line) for line in lines]
    assert [each.group(1, 2) for each in found] == [
        ("before", "0"),
        ("staged", "0"),
        ("under way", "0"),
        ("under way", "1"),
        ("after", "1"),
    ]
    # Some ten products of up to 128 terms, of magnitudes up to ten: each is off by at most n·eps.
    bound = 10 * 128 * 2**-23 * 10
    for each in found:
        assert (float(each[3]) < bound) == (each[2] == "1"), each[0]


def test_the_test_of_a_train_of_ones_own_passes():
    asked = ["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "test_your_train.py"]
    done = subprocess.run(
        [sys.executable, *asked], cwd=EXAMPLES, capture_output=True, text=True, check=False
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr
