"""Whole runs on two ranks, small: sampling, repeating and resuming."""

from __future__ import annotations

import json
import os

import pytest

pytest.importorskip("tokenizers")  # comes with the extra `trainer`

from megatron_idempotent.patching.source import locate
from megatron_idempotent.proof.cpu import RankError
from megatron_idempotent.rl.metrics.loggers import METRICS_FILE, read_metrics
from megatron_idempotent.rl.trainer import checkpoint_dir, launch
from megatron_idempotent.rl.trainer.config import load_config
from megatron_idempotent.rl.trainer.launch import explain_failure
from megatron_idempotent.rl.trainer.main import main
from megatron_idempotent.rl.trainer.output import prepare

pytestmark = pytest.mark.skipif(
    locate("megatron.training.training") is None,
    reason="this release's wheel does not carry megatron.training",
)

SMALL = (
    "model.hidden=32",
    "model.ffn=32",
    "rollout.prompts=8",
    "rollout.group_size=8",
    "evaluation.prompts=9",
    "evaluation.every=1",
    "run.checkpoint_every=2",
)
TIMEOUT_S = 120.0


def job_for(out, *overrides, resume=False):
    config = load_config(overrides=[*SMALL, f"run.out={out}", *overrides])
    return prepare(config, resume=resume, quiet=True)


def reproducible(job):
    """The metrics of a run without what the clock decides."""
    return [
        {name: value for name, value in row.items() if not name.startswith("timing/")}
        for row in read_metrics(job.out / METRICS_FILE)
    ]


def digest(job, rollouts):
    return checkpoint_dir.verify(checkpoint_dir.path_for(job.out / "checkpoints", rollouts))[
        "weights sha256"
    ]


def compare_sampling_with_training(job, make=None):
    """Runs on a rank: one update, then the engine's log-probs against the training forward's.

    `make` takes the place of `make_engines`.
    """
    import torch

    import megatron_idempotent
    from megatron_idempotent.rl.trainer.batch import pack_rows
    from megatron_idempotent.rl.trainer.checkpoint import weights_digest
    from megatron_idempotent.rl.trainer.engines import make_engines
    from megatron_idempotent.rl.trainer.loss import decoder_logits
    from megatron_idempotent.rl.trainer.policy import MegatronPolicy, ensure_checkpoint
    from megatron_idempotent.rl.trainer.rewards import RequestMaker
    from megatron_idempotent.rl.trainer.task.prompts import Prompt
    from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer

    megatron_idempotent.apply()
    # Several lengths of prompt, in mixed order.
    texts = ["a b c d", "b a", "c c d a", "d b", "a a a b", "b c", "d d c b", "c a"]
    prompts = [
        Prompt(row=row, text=text, answer=text, split="train") for row, text in enumerate(texts)
    ]
    tokenizer = TextTokenizer.of_words(prompts)
    config, positions, temperature = job.config, 9, job.config.rollout.temperature
    checkpoint = ensure_checkpoint(
        job.out / "initial", config.model, tokenizer, seed=1, positions=positions + 1
    )
    policy = MegatronPolicy(config, checkpoint, positions=positions)
    engines = (make or make_engines)(config, policy, checkpoint, job.out)
    maker = RequestMaker(tokenizer, temperature=temperature, max_response_tokens=5, seed=1)

    def drawn(prompts, stream):
        requests = [maker.make(each, stream=stream, samples=4) for each in prompts]
        found = iter(engines.generate([request for each in requests for request in each]))
        return [[next(found) for _ in each] for each in requests]

    def as_batch(groups):
        rows = [
            (tokenizer.encode_prompt(prompt.text), sample, advantage)
            for prompt, samples in zip(prompts, groups, strict=True)
            for sample, advantage in zip(samples, (1.0, -1.0, 0.5, -0.5), strict=True)
        ]
        return pack_rows(rows, positions=positions, pad_id=tokenizer.pad_id)

    def publish(version):
        with policy.weights():
            engines.publish(version)

    publish(0)
    policy.train(as_batch(drawn(prompts, 0)), index=0)
    publish(1)
    groups = drawn(prompts, 1)
    alone = drawn(prompts[2:3], 1)
    engines.close()
    batch = as_batch(groups)
    with policy.weights() as modules, torch.no_grad():
        logits_BTV = decoder_logits(modules[0], batch.tokens_BT)
        trained_BT = megatron_idempotent.token_logprobs(
            logits=logits_BTV, targets=batch.targets_BT, temperature=temperature
        ).logprob
    response_BT = batch.loss_mask_BT > 0
    return {
        "weights": weights_digest(modules),
        "training": modules[0].training,
        "largest gap": float((trained_BT - batch.old_logprobs_BT)[response_BT].abs().max()),
        "largest logit": float(logits_BTV.abs().max()),
        "spread": float(batch.old_logprobs_BT[response_BT].std()),
        "same alone": [s.tokens for s in alone[0]] == [s.tokens for s in groups[2]],
        "order": [int(group[0].request_id.split("/")[1]) for group in groups],
        "versions": sorted({v for g in groups for s in g for v in s.versions}),
    }


def test_the_engine_gives_the_log_probabilities_of_the_training_forward(megatron_ranks, tmp_path):
    job = job_for(
        tmp_path / "run",
        "rollout.temperature=0.7",
        "rollout.group_size=4",
        "rollout.prompts=16",
        "model.init_std=0.4",
    )
    ranks = megatron_ranks(2, compare_sampling_with_training, job, timeout_s=TIMEOUT_S)
    for seen in ranks:
        # Both paths compute the same float32 sums in another order. A logit is a sum of 32 products
        # after two layers of such sums: some 200 roundings of 2^-24 relative to the largest logit,
        # divided by the temperature, twice (the logit, and the logarithm of the sum over V).
        bound = 2 * 200 * 2.0**-24 * max(seen["largest logit"], 1.0) / 0.7
        assert seen["largest gap"] < bound
        assert seen["spread"] > 0.1  # the policy is far from uniform, so the comparison says much
        assert seen["same alone"]
        assert seen["order"] == list(range(8))
        assert seen["training"]
        assert seen["versions"] == [1]
    # No rank sampled from parameters that another one had already replaced.
    assert ranks[0]["weights"] == ranks[1]["weights"]


def fail_in_the_data(job):
    raise ValueError("a bug of mine")


def test_the_error_of_a_rank_comes_with_its_traceback(megatron_ranks, tmp_path):
    job = job_for(tmp_path / "run")
    with pytest.raises(RankError) as error:
        megatron_ranks(1, fail_in_the_data, job, timeout_s=TIMEOUT_S)
    told = explain_failure(error.value, job)
    assert "ValueError: a bug of mine" in told
    assert "in fail_in_the_data" in told
    assert "rank-0.log" in told


def test_the_command_writes_logs_curves_and_a_table_and_resumes_by_name(
    megatron_ranks, tmp_path, monkeypatch, capsys
):
    def start_ranks(job):
        megatron_ranks(job.config.run.ranks, launch.run_rank, job, timeout_s=TIMEOUT_S)

    monkeypatch.setattr(launch, "start_ranks", start_ranks)
    data = tmp_path / "mine.jsonl"
    rows = [
        {"prompt": f"say {a} {b}", "answer": b, "split": split}
        for split, letters in (("train", "abcdefgh"), ("held_out", "xy"))
        for a in letters
        for b in letters
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "run"
    overrides = [word for setting in SMALL for word in ("--set", setting)]
    code = main([*overrides, "--data", str(data), "--rollouts", "1", "--out", str(out)])
    assert code == 0
    assert "held-out reward at the end" in capsys.readouterr().out
    for name in ("curves.png", "model/tokenizer.json", "config.toml", "logs/rank-1.log"):
        assert (out / name).stat().st_size > 0
    assert list((out / "tensorboard").glob("events.*"))

    # Resumed with nothing but its name: prompts and settings are those that it left.
    checkpoint = ["--set", "run.checkpoint_every=1"]
    assert main([*checkpoint, "--resume", "--out", str(out), "--rollouts", "2", "--quiet"]) == 0
    assert [row["step"] for row in read_metrics(out / METRICS_FILE)] == [0, 1, 2]

    capsys.readouterr()
    damaged(out / "model-initial" / "model.safetensors")
    assert main(["--resume", "--out", str(out), "--rollouts", "3"]) == 2
    assert f"{out / 'model-initial' / 'model.safetensors'}: its content" in capsys.readouterr().err
    damaged(out / "model" / "model.safetensors")
    new = ["--model", str(out / "model"), "--out", str(tmp_path / "new"), "--data", str(data)]
    assert main(new) == 2
    assert "model.safetensors: its content is not that of SHA256SUMS" in capsys.readouterr().err
    (out / "model" / "SHA256SUMS").unlink()
    os.truncate(out / "model" / "model.safetensors", 1000)
    assert main(new) == 2
    assert "model.safetensors is missing, incomplete or damaged" in capsys.readouterr().err


def test_a_checkpoint_is_asked_what_the_file_says_and_the_verifier_has_the_rows_fields(
    megatron_ranks, tmp_path, monkeypatch
):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from megatron_idempotent.rl.trainer.config import ModelConfig
    from megatron_idempotent.rl.trainer.policy import write_checkpoint
    from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer

    def start_ranks(job):
        megatron_ranks(job.config.run.ranks, noting, job, str(asked), timeout_s=TIMEOUT_S)

    monkeypatch.setattr(launch, "start_ranks", start_ranks)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    asked, scored = tmp_path / "asked", tmp_path / "scored"
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
    launch.run_rank(job)


def damaged(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def run_and_note_versions(job):
    """Runs on a rank: a whole run; each update, and after it the versions of what is sampled."""
    from megatron_idempotent.rl.trainer.engines import Engines

    noted, publish, generate = [], Engines.publish, Engines.generate

    def noting_publish(self, version):
        publish(self, version)
        noted.append((version, set()))

    def noting_generate(self, requests):
        samples = generate(self, requests)
        noted[-1][1].update(v for sample in samples for v in sample.versions)
        return samples

    Engines.publish, Engines.generate = noting_publish, noting_generate
    launch.run_rank(job)
    return noted


@pytest.fixture(scope="module")
def run(megatron_rank_pool, tmp_path_factory):
    """`run(name, *overrides)` runs a job of that name; the job, and what its ranks noted."""
    out = tmp_path_factory.mktemp("runs")

    def run(name, *overrides, resume=False):
        job = job_for(out / name, *overrides, resume=resume)
        noted = megatron_rank_pool.run(2, run_and_note_versions, job, timeout_s=TIMEOUT_S)
        return job, noted

    return run


@pytest.fixture(scope="module")
def whole(run):
    """A run of three rollouts."""
    return run("whole", "run.rollouts=3")


@pytest.fixture(scope="module")
def resumed(run):
    """Do the same run in two parts; return the metrics after the first, and what `run` gives of
    both."""
    half, noted = run("half", "run.rollouts=2")
    return len(reproducible(half)), noted, *run("half", "run.rollouts=3", resume=True)


def test_a_run_repeats_and_resumes_bit_for_bit(run, whole, resumed):
    (job, _), (rows_before, _, half, _) = whole, resumed
    assert rows_before == 3
    assert len(reproducible(job)) == 4
    assert digest(job, 3) != digest(job, 2)
    assert reproducible(job) == reproducible(half)
    assert digest(job, 3) == digest(half, 3)

    other, _ = run("other", "run.rollouts=2", "run.seed=2")
    assert digest(other, 2) != digest(job, 2)  # or the digest would say nothing


def test_every_rollout_is_sampled_with_the_weights_of_the_one_before(whole, resumed):
    for noted in whole[1]:
        assert noted == [(0, {0}), (1, {1}), (2, {2}), (3, {3})]
    _, before, _, after = resumed
    for noted in before:
        assert noted == [(0, {0}), (1, {1}), (2, {2})]
    for noted in after:
        assert noted == [(2, {2}), (3, {3})]
