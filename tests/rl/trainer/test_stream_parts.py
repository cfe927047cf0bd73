"""Parts of the asynchronous trainer, each by itself."""

from __future__ import annotations

import asyncio
import importlib
import sys

import pytest

pytest.importorskip("tokenizers")

import torch

from megatron_idempotent.rl.controller import RolloutGroup
from megatron_idempotent.rl.engines import Sample
from megatron_idempotent.rl.metrics.loggers import read_metrics
from megatron_idempotent.rl.trainer import DataError
from megatron_idempotent.rl.trainer.async_ranks import RankPolicy
from megatron_idempotent.rl.trainer.async_run import last_version, make_settings
from megatron_idempotent.rl.trainer.batch import Batch
from megatron_idempotent.rl.trainer.config import load_config
from megatron_idempotent.rl.trainer.layout import RankLayout
from megatron_idempotent.rl.trainer.output import Job
from megatron_idempotent.rl.trainer.report import make_loggers
from megatron_idempotent.rl.trainer.rewards import Evaluation, GrpoRecipe, PromptStream, Scorer
from megatron_idempotent.rl.trainer.task.prompts import Prompt, PromptSet, rollout_prompts
from megatron_idempotent.rl.trainer.task.reward import FieldsOf, position_reward
from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer

PROMPTS = [Prompt(row=row, text=f"say {a}", answer=a, split="train") for row, a in enumerate("abc")]


class Ranks:
    """Ranks that return what they were given."""

    async def call(self, method, *args, per_rank=None, timeout_s=None):
        self.given = per_rank
        return [part.old_logprobs_BT * 10 for part in per_rank]


def batch_of(rows):
    values_BT = torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, 4).contiguous()
    return Batch(
        tokens_BT=values_BT.long(),
        targets_BT=values_BT.long(),
        old_logprobs_BT=values_BT,
        advantages_B=values_BT[:, 0],
        loss_mask_BT=torch.ones(rows, 4),
    )


@pytest.mark.parametrize("rows", [7, 2, 1])
def test_rows_go_to_ranks_in_turns_and_log_probs_come_back_in_their_places(rows):
    ranks = Ranks()
    policy = RankPolicy(ranks, RankLayout(replicas=3), timeout_s=1.0)
    found_BT = asyncio.run(policy.logprobs(batch_of(rows), "policy"))
    assert [part.tokens_BT[:, 0].tolist() for part in ranks.given] == [
        list(range(rank, rows, 3)) for rank in range(3)
    ]
    assert torch.equal(found_BT, batch_of(rows).old_logprobs_BT * 10)


@pytest.mark.parametrize("rows", [7, 1])
def test_ranks_of_a_replica_get_the_same_rows_and_as_many_as_others_where_replicas_meet(rows):
    ranks = Ranks()
    layout = RankLayout(tp=2, pp=2, replicas=3)
    policy = RankPolicy(ranks, layout, timeout_s=1.0, meet=True)
    found_BT = asyncio.run(policy.logprobs(batch_of(rows), "policy"))
    most = -(-rows // 3)
    for rank, part in enumerate(ranks.given):
        mine = list(range(layout.replica(rank), rows, 3))
        assert part.tokens_BT[:, 0].tolist() == mine + [0] * (most - len(mine))
        assert part.loss_mask_BT.sum() == 4 * len(mine)
    assert torch.equal(found_BT, batch_of(rows).old_logprobs_BT * 10)


def test_the_stream_of_prompts_is_that_of_the_rollouts_and_counts_epochs():
    stream = PromptStream(PROMPTS, seed=5)
    rollouts = [p for i in range(4) for p in rollout_prompts(PROMPTS, index=i, count=2, seed=5)]
    assert [stream.prompt(place) for place in range(8)] == rollouts
    assert [stream.epoch(place) for place in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert {stream.prompt(place).row for place in range(3, 6)} == {0, 1, 2}


def group_of(rewards, versions=(3, 3)):
    samples = tuple(
        Sample(
            request_id=str(number),
            tokens=(5, 1),
            logprobs=(-0.5, -0.25),
            versions=versions,
            finish_reason="stop",
        )
        for number in range(len(rewards))
    )
    return RolloutGroup(id=7, prompt=PROMPTS[0], samples=samples, rewards=rewards)


def recipe(*overrides):
    config = load_config(None, ["run.mode=async", *overrides])
    return GrpoRecipe(config, TextTokenizer.of_words(PROMPTS), positions=6)


def test_groups_without_a_spread_of_rewards_are_left_out_where_that_is_asked_for():
    assert recipe().rejects(group_of((1.0, 1.0))) == ""
    asked = recipe("controller.drop_tied=true")
    assert asked.rejects(group_of((1.0, 1.0))) == "tied"
    assert asked.rejects(group_of((1.0, 0.5))) == ""


def test_a_batch_has_the_proximal_log_probs_and_weights_for_older_samples():
    truncate = ("loss.old_logprobs=recomputed", "loss.correction=truncate")
    made = recipe(*truncate, "loss.correction_high=2.0")
    groups = [group_of((1.0, 0.0), versions=(2, 3))]
    inputs = made.inputs(groups)
    proximal_BT = inputs.old_logprobs_BT + torch.tensor([0.5, 5.0])[:, None]
    batch = made.batch(groups, inputs, {"policy": proximal_BT, "reference": proximal_BT - 1})
    response_BT = inputs.loss_mask_BT > 0
    assert torch.equal(batch.old_logprobs_BT, proximal_BT)
    assert torch.equal(batch.reference_logprobs_BT, proximal_BT - 1)
    weights = [row[mask].tolist() for row, mask in zip(batch.weights_BT, response_BT, strict=True)]
    assert weights == [[pytest.approx(1.6487213)] * 2, [2.0, 2.0]]
    assert batch.advantages_B.tolist() == pytest.approx([1.0, -1.0], abs=1e-3)
    found = made.metrics(groups, 3)
    assert found["correction/truncated"] == 0.5
    assert found["correction/largest_ratio"] == pytest.approx(148.41316)
    assert found["mixed_version_fraction"] == 1.0
    assert found["reward"] == 0.5
    assert "correction/ratio" not in made.metrics(groups, 3)  # told once


def test_evaluation_is_due_at_both_ends_and_now_and_then():
    every = Evaluation(None, None, None, [], every=4, last=10)
    assert [version for version in range(12) if every.due(version)] == [0, 4, 8, 10]
    ends = Evaluation(None, None, None, [], every=0, last=10)
    assert [version for version in range(12) if ends.due(version)] == [0, 10]
    assert asyncio.run(ends(3)) == {}


def test_a_verifier_sees_the_words_of_each_response_and_whether_it_ended():
    seen = []

    def reward(text, answer, *, finished):
        seen.append((text, answer, finished))
        return 1

    tokenizer = TextTokenizer.of_words(PROMPTS)
    tokens = tokenizer.encode_answer("a")
    samples = [
        Sample(
            request_id="",
            tokens=each,
            logprobs=(0.0,) * len(each),
            versions=(0,) * len(each),
            finish_reason=reason,
        )
        for each, reason in ((tokens, "stop"), (tokens[:1], "length"))
    ]
    assert asyncio.run(Scorer(reward, tokenizer)(0, PROMPTS[0], samples)) == (1.0, 1.0)
    assert seen == [("a", "a", True), ("a", "a", False)]


def test_a_verifier_gets_the_fields_that_it_has_parameters_for():
    fields = {"tests": [1], "level": 2}
    prompt = Prompt(row=4, text="a", answer="b", split="train", fields=fields)
    seen = []

    def one(response, answer, *, finished, level):
        seen.append(level)
        return 0

    def every(response, answer, *, finished, **rest):
        seen.append(rest)
        return 0

    sample = Sample(request_id="", tokens=(), logprobs=(), versions=(), finish_reason="stop")
    for reward in (one, every, position_reward):
        Scorer(reward, TextTokenizer.of_words(PROMPTS)).rewards(prompt, [sample])
    assert seen == [2, fields]
    held_out = Prompt(row=7, text="c", answer="b", split="held_out", fields={"tests": []})
    prompts = PromptSet(train=(prompt,), held_out=(held_out,))
    FieldsOf(every).check(prompts)
    FieldsOf(position_reward).check(prompts)
    with pytest.raises(DataError, match="line 8 of the prompts: no field 'level'"):
        FieldsOf(one).check(prompts)


def test_settings_of_the_controller_are_those_of_the_configuration():
    config = load_config(None, ["run.mode=async"])
    settings = make_settings(config)
    assert (settings.target_groups, settings.group_size) == (32, 8)
    assert settings.groups_per_call == 16, "half of a step's"
    assert (settings.minibatches, settings.logprobs, last_version(config)) == (1, "reference", 600)
    recomputed = "loss.old_logprobs=recomputed"
    for overrides, asked in [
        ([recomputed], "both"),
        ([recomputed, "loss.kl_coefficient=0"], "policy"),
        ([recomputed, "loss.kl_reference=old"], "policy"),
        (["loss.kl_coefficient=0"], "none"),
    ]:
        assert make_settings(load_config(None, ["run.mode=async", *overrides])).logprobs == asked
    two = make_settings(load_config(None, ["run.mode=async", "optimizer.steps_per_rollout=2"]))
    assert (two.minibatches, two.groups_per_step) == (2, 16)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_logger_of_a_run_hears_of_every_row(mode, tmp_path, monkeypatch):
    module = f"my_logger_of_a_{mode}_run"
    (tmp_path / f"{module}.py").write_text(
        "HEARD = []\n"
        "class Mine:\n"
        "    def __init__(self, directory, *, first_step): ...\n"
        "    def log(self, metrics, *, step): HEARD.append((step, metrics))\n"
        "    def close(self): HEARD.append('closed')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    overrides = [f"run.mode={mode}", f"controller.loggers={module}:Mine"]
    job = Job(config=load_config(None, overrides), out=tmp_path)
    table = importlib.import_module(module).Mine(tmp_path, first_step=0)
    loggers = make_loggers(job, table, threaded=mode == "async")
    row = {"train/reward": 0.5}
    loggers.log(row, step=3)
    loggers.close()
    assert [(3, row), (3, row), "closed", "closed"] == sys.modules[module].HEARD
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 3, **row}]
