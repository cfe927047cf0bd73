"""Whole runs on two ranks, small: sampling, repeating and resuming."""

from __future__ import annotations

import json
import os
import re

import pytest

pytest.importorskip("tokenizers")  # comes with the extra `trainer`

from sampling_case import SETTINGS, check, compare_sampling_with_training, write_other
from trainer_cases import SYNC, TIMEOUT_S, digest, job_for, needs_megatron_training, rows

from megatron_idempotent.rl.metrics.loggers import METRICS_FILE, read_metrics
from megatron_idempotent.rl.trainer import loop
from megatron_idempotent.rl.trainer import main as command
from megatron_idempotent.rl.trainer.main import main

pytestmark = needs_megatron_training
SMALL = (*SYNC, "evaluation.every=1", "run.checkpoint_every=2")
#: The version of an earlier run, whose weights a shared engine serves.
SERVED = 7


def one_for_all(job, policy):
    """Runs on a rank: an engine on rank 0, with the weights of another seed."""
    import torch.distributed as dist

    from megatron_idempotent.rl.engines.transformers import TransformersEngine
    from megatron_idempotent.rl.trainer.engines import Engines

    engines = []
    if dist.get_rank() == 0:
        write_other(job.out / "other", job.config.model)
        engines = [TransformersEngine(job.out / "other", name="served", version=SERVED)]
    return Engines(engines, policy.source(), job.config, shared=True)


@pytest.mark.parametrize(
    ("make", "deltas"),
    [
        pytest.param(None, False, id="each rank's own"),
        pytest.param(one_for_all, True, id="one for all"),
        pytest.param(one_for_all, False, id="all tensors", marks=pytest.mark.exhaustive),
    ],
)
def test_engines_give_the_log_probabilities_of_the_training_forward(
    make, deltas, megatron_ranks, tmp_path
):
    job = job_for(tmp_path / "run", *SETTINGS, f"sync.deltas={str(deltas).lower()}")
    ranks = megatron_ranks(2, compare_sampling_with_training, job, make, timeout_s=TIMEOUT_S)
    check(ranks, batched_alike=make is None)


def start_ranks_of(run, patch, function=loop.work, *arguments):
    """Have the command start its ranks with those of this session."""

    def start_ranks(job):
        run(job.config.run.ranks, function, job, *arguments, timeout_s=TIMEOUT_S)

    patch.setattr(command, "start_ranks", start_ranks)


def run_with_terminal(job, terminal):
    """Runs on a rank, whose standard error goes to a file."""
    os.dup2(os.open(terminal, os.O_CREAT | os.O_APPEND | os.O_WRONLY), 2)
    loop.work(job)


def fail_in_the_data(job):
    raise ValueError("a bug of mine")


def test_the_command_writes_logs_curves_and_a_table_and_resumes_by_name(
    megatron_ranks, tmp_path, monkeypatch, capsys
):
    terminal = tmp_path / "terminal"
    start_ranks_of(megatron_ranks, monkeypatch, run_with_terminal, terminal)
    data = tmp_path / "mine.jsonl"
    rows = [
        {"prompt": f"say {a} {b}", "answer": b, "split": split}
        for split, letters in (("train", "abcdefgh"), ("held_out", "xy"))
        for a in letters
        for b in letters
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "run"
    settings = (*SMALL, "sync.deltas=true")
    overrides = [word for setting in settings for word in ("--set", setting)]
    code = main([*overrides, "--data", str(data), "--rollouts", "1", "--out", str(out)])
    assert code == 0
    said = capsys.readouterr()
    assert "held-out reward at the end" in said.out
    lines = (said.err + terminal.read_text()).splitlines()
    phases = [found for line in lines if (found := re.fullmatch(r" *([\d.]+) s  (.*)", line))]
    assert [phase[2] for phase in phases] == [
        "checking settings, prompts and model",
        "starting 2 ranks: importing torch and Megatron",
        "building the model",
        "evaluating, and then the first rollout",
    ]
    seconds = [float(phase[1]) for phase in phases]
    assert seconds == sorted(seconds)
    for name in ("curves.png", "model/tokenizer.json", "config.toml", "logs/rank-1.log"):
        assert (out / name).stat().st_size > 0
    assert list((out / "tensorboard").glob("events.*"))

    # Resumed with nothing but its name: prompts and settings are those that it left.
    checkpoint = ["--set", "run.checkpoint_every=1"]
    assert main([*checkpoint, "--resume", "--out", str(out), "--rollouts", "2", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert len(terminal.read_text().splitlines()) == len(lines) - 2, "nothing more"
    found = read_metrics(out / METRICS_FILE)
    assert [row["step"] for row in found] == [0, 1, 2]
    for row in found[1:]:
        assert 0 < row["sync/bytes_sent"] < row["sync/bytes_whole"]
        assert row["sync/changed"] < 1
        assert min(row["sync/encode_s"], row["sync/decode_s"]) > 0

    capsys.readouterr()
    damaged(out / "model-initial" / "model.safetensors")
    assert main(["--resume", "--out", str(out), "--rollouts", "3"]) == 2
    assert f"{out / 'model-initial' / 'model.safetensors'}: its " in capsys.readouterr().err
    damaged(out / "model" / "model.safetensors")
    new = ["--model", str(out / "model"), "--out", str(tmp_path / "new"), "--data", str(data)]
    assert main(new) == 2
    assert "bytes are not those of SHA256SUMS" in capsys.readouterr().err
    (out / "model" / "SHA256SUMS").unlink()
    os.truncate(out / "model" / "model.safetensors", 1000)
    assert main(new) == 2
    assert "model.safetensors is missing, incomplete or damaged" in capsys.readouterr().err

    start_ranks_of(megatron_ranks, monkeypatch, fail_in_the_data)
    assert main(["--out", str(tmp_path / "failed"), "--data", str(data), *overrides]) == 1
    told = capsys.readouterr().err
    for said in ("ValueError: a bug of mine", "in fail_in_the_data", "failed/logs/rank-"):
        assert said in told


def test_a_checkpoint_is_asked_what_the_file_says_and_the_verifier_has_the_rows_fields(
    megatron_ranks, tmp_path, monkeypatch
):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from megatron_idempotent.rl.trainer.config import ModelConfig
    from megatron_idempotent.rl.trainer.megatron_setup import write_checkpoint
    from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer

    asked, scored = tmp_path / "asked", tmp_path / "scored"
    start_ranks_of(megatron_ranks, monkeypatch, noting, str(asked))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "verifier_of_code.py").write_text(
        "def tested(response, answer, *, finished, tests, level=0):\n"
        f"    with open({str(scored)!r}, 'a') as file:\n"
        "        print([answer, tests, level], file=file)\n"
        "    return 0.5\n"
    )
    # One token for each byte: nothing is lost but by who reads the prompts.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({each: place for place, each in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = TextTokenizer(bytewise, end_ids=(0,), pad_id=0, vocabulary_size=256)
    shape = ModelConfig(layers=2, hidden=32, ffn=32)
    write_checkpoint(tmp_path / "model", shape, tokenizer, seed=1, positions=64)
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}:")
    indented = "if x:\n  if y:\n    z = "
    texts = [indented, indented.replace("    ", "  "), f"{indented} "]
    rows = [{"prompt": text, "tests": [text], "split": "train"} for text in texts]
    rows.append({**rows[0], "prompt": [{"role": "user", "content": indented}], "level": 2})
    rows.append({**rows[0], "prompt": "held\tout", "split": "held_out"})
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps({"answer": " a\n", **row}) + "\n" for row in rows))
    small = [
        *SMALL,
        "rollout.prompts=4",
        "evaluation.prompts=1",
        "task.reward=verifier_of_code:tested",
    ]
    overrides = [word for setting in small for word in ("--set", setting)]
    run = ["--data", str(data), "--model", str(tmp_path / "model"), "--rollouts", "1", "--quiet"]
    assert main([*overrides, *run]) == 0
    told = {json.loads(line) for line in asked.read_text().splitlines()}
    assert told == {*texts, f"{indented}:", "held\tout"}
    found = set(scored.read_text().splitlines())
    assert found == {str([" a\n", row["tests"], row.get("level", 0)]) for row in rows}
    # A field that the verifier needs is asked for before anything starts.
    data.write_text(data.read_text().replace('"tests"', '"other"', 1))
    assert main([*overrides, *run, "--out", str(tmp_path / "another")]) == 2


def noting(job, file):
    """Runs on a rank: a whole run; writes down what the engines are asked."""
    from tokenizers import Tokenizer

    from megatron_idempotent.rl.trainer.engines import Engines

    generate = Engines.generate

    def noting_generate(self, requests):
        tokenizer = Tokenizer.from_file(f"{job.config.model.path}/tokenizer.json")
        with open(file, "a") as asked:
            for each in requests:
                print(json.dumps(tokenizer.decode(each.prompt)), file=asked)
        return generate(self, requests)

    Engines.generate = noting_generate
    loop.work(job)


def damaged(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def run_and_note_versions(job):
    """Runs on a rank: a whole run; each update, and after it the versions of what is sampled."""
    from megatron_idempotent.rl.trainer.engines import Engines

    noted, publish, generate = [], Engines.publish, Engines.generate

    def noting_publish(self, version):
        published = publish(self, version)
        noted.append((version, set()))
        return published

    def noting_generate(self, requests):
        samples = generate(self, requests)
        noted[-1][1].update(v for sample in samples for v in sample.versions)
        return samples

    Engines.publish, Engines.generate = noting_publish, noting_generate
    loop.work(job)
    return noted


@pytest.fixture(scope="module")
def run(megatron_rank_pool, tmp_path_factory):
    """`run(name, *overrides)` runs a job of that name; the job, and what its ranks noted."""
    out = tmp_path_factory.mktemp("runs")

    def run(name, *overrides, resume=False):
        job = job_for(out / name, *SMALL, *overrides, resume=resume)
        noted = megatron_rank_pool.run(2, run_and_note_versions, job, timeout_s=TIMEOUT_S)
        return job, noted

    return run


@pytest.fixture(scope="module")
def whole(run):
    """A run of three rollouts."""
    return run("whole", "run.rollouts=3")


@pytest.fixture(scope="module")
def resumed(run):
    """The same run in two parts: the steps of the first, what its ranks noted, and `run`'s."""
    half, noted = run("half", "run.rollouts=2")
    return sorted(rows(half)), noted, *run("half", "run.rollouts=3", resume=True)


def test_a_run_repeats_and_resumes_bit_for_bit(whole, resumed):
    (job, _), (steps_before, _, half, _) = whole, resumed
    assert steps_before == [0, 1, 2]
    assert sorted(rows(job)) == [0, 1, 2, 3]
    assert digest(job, 3) != digest(job, 2)  # or the digest would say nothing
    assert rows(job) == rows(half)
    assert digest(job, 3) == digest(half, 3)


def test_every_rollout_is_sampled_with_the_weights_of_the_one_before(whole, resumed):
    for noted in whole[1]:
        assert noted == [(0, {0}), (1, {1}), (2, {2}), (3, {3})]
    _, before, _, after = resumed
    for noted in before:
        assert noted == [(0, {0}), (1, {1}), (2, {2})]
    for noted in after:
        assert noted == [(2, {2}), (3, {3})]
