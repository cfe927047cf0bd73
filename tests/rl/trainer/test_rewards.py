"""Requests, rewards, advantages and batches: the parts that both trainers have, each by itself."""

from __future__ import annotations

import asyncio
import math
import statistics

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("torch")

import torch

from megatron_idempotent.rl.controller import RolloutGroup
from megatron_idempotent.rl.engines import Sample
from megatron_idempotent.rl.trainer import ConfigError, DataError
from megatron_idempotent.rl.trainer.async_run import make_settings
from megatron_idempotent.rl.trainer.batch import chunks, pack_rows
from megatron_idempotent.rl.trainer.config import load_config
from megatron_idempotent.rl.trainer.rewards import (
    Evaluation,
    GrpoRecipe,
    Scorer,
    group_advantages,
    make_requests,
)
from megatron_idempotent.rl.trainer.task.prompts import Prompt, PromptSet
from megatron_idempotent.rl.trainer.task.reward import Verifier, position_reward
from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer

PROMPTS = [Prompt(row=row, text=f"say {a}", answer=a, split="train") for row, a in enumerate("abc")]
TOKENIZER = TextTokenizer.of_words(PROMPTS)


def sample(*tokens, logprobs=None, versions=(0,), finish="stop"):
    logprobs = (-0.5,) * len(tokens) if logprobs is None else logprobs
    versions = (versions * len(tokens))[: len(tokens)]
    return Sample(
        request_id="0/0/0",
        tokens=tokens,
        logprobs=logprobs,
        versions=versions,
        finish_reason=finish,
    )


@pytest.mark.parametrize(
    ("response", "finished", "reward"),
    [
        ("c b a", True, 1.0),
        ("c b a", False, 0.75),  # never said that it was done
        ("c b x", True, 0.75),
        ("a b c", True, 0.5),  # the middle, and the end
        ("", True, 0.0),
        ("c", True, 0.25),
        ("c b a a", True, 0.6),  # 3 of 5: the denominator grows with what was said
        ("x x x x", False, 0.0),
    ],
)
def test_the_reward_is_the_share_of_right_positions(response, finished, reward):
    assert position_reward(response, "c b a", finished=finished) == reward


def test_advantages_are_rewards_standardised_within_the_group():
    rewards = [0.0, 0.25, 0.25, 1.0]
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    for normalize_std, by in ((True, std + 1e-4), (False, 1.0)):
        expected = [(reward - mean) / by for reward in rewards]
        found = group_advantages(rewards, normalize_std=normalize_std)
        assert found == pytest.approx(expected, abs=1e-15)
    assert group_advantages([0.3] * 3, normalize_std=True) == (0.0, 0.0, 0.0)


def test_every_request_has_a_seed_of_its_own_by_the_runs_seed():
    def seeds(seed, stream):
        config, options = load_config(None, [f"run.seed={seed}"]), {"stream": stream, "samples": 4}
        made = [each for p in PROMPTS for each in make_requests(config, TOKENIZER, p, **options)]
        assert [each.id for each in made[:2]] == [f"{stream}/0/0", f"{stream}/0/1"]
        return [each.seed for each in made]

    assert len({*seeds(1, 0), *seeds(1, 1), *seeds(2, 0)}) == 3 * 12
    assert seeds(1, 0) == seeds(1, 0)


ROWS = [
    ((3, 4, 2), sample(5, 1, logprobs=(-0.5, -0.1)), 1.0),
    ((3, 4, 2), sample(6, 6, 6, logprobs=(-1.0, -2.0, -3.0)), -1.0),
]


def test_packing_shifts_targets_by_one_and_masks_the_response():
    batch = pack_rows(ROWS, positions=6, pad_id=0)
    assert batch.tokens_BT.tolist() == [[3, 4, 2, 5, 1, 0], [3, 4, 2, 6, 6, 6]]
    assert batch.targets_BT.tolist() == [[4, 2, 5, 1, 0, 0], [4, 2, 6, 6, 6, 0]]
    assert batch.loss_mask_BT.tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]]
    assert batch.old_logprobs_BT[0].equal(torch.tensor([0, 0, -0.5, -0.1, 0, 0]))
    assert batch.advantages_B.tolist() == [1.0, -1.0]
    tensors = batch.tensors()
    assert tensors["token_mask"].tolist() == [[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 0]]
    assert "reference_logprobs" not in tensors
    with pytest.raises(ValueError, match="has 6 tokens, and positions is 4, with room for 5"):
        pack_rows(ROWS, positions=4, pad_id=0)


def test_chunks_use_every_sequence_once_in_a_seeded_order():
    batch = pack_rows(ROWS * 6, positions=5, pad_id=0)
    batch.advantages_B.copy_(torch.arange(12.0))

    def order(seed, index):
        pieces = list(chunks(batch, size=4, seed=seed, index=index))
        assert [len(piece) for piece in pieces] == [4, 4, 4]
        return [int(value) for piece in pieces for value in piece.advantages_B]

    assert sorted(order(1, 0)) == list(range(12))
    assert order(1, 0) == order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def group_of(rewards, versions=(3,)):
    samples = tuple(sample(5, 1, logprobs=(-0.5, -0.25), versions=versions) for _ in rewards)
    return RolloutGroup(id=7, prompt=PROMPTS[0], samples=samples, rewards=rewards)


def recipe(*overrides):
    config = load_config(None, ["run.mode=async", *overrides])
    return GrpoRecipe(config, TOKENIZER, positions=6)


def test_groups_without_a_spread_of_rewards_are_left_out_where_that_is_asked_for():
    assert recipe().rejects(group_of((1.0, 1.0))) == ""
    asked = recipe("controller.drop_tied=true")
    reason = asked.rejects(group_of((1.0, 1.0)))
    assert "task.reward megatron_idempotent.rl.trainer.task.reward:position_reward" in reason
    assert "2 samples 1 each" in reason
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
    assert (found["mixed_version_fraction"], found["reward"]) == (1.0, 0.5)
    assert "correction/ratio" not in made.metrics(groups, 3)  # told once


def test_evaluation_is_due_at_both_ends_and_now_and_then():
    for every, versions in ((2, [0, 4, 8, 10]), (0, [0, 10])):
        settings = ["run.rollouts=5", "optimizer.steps_per_rollout=2", f"evaluation.every={every}"]
        evaluation = Evaluation(load_config(None, settings), None, None, None, [])
        assert [version for version in range(12) if evaluation.due(version)] == versions
    assert asyncio.run(evaluation(3)) == {}


def test_a_verifier_sees_the_words_of_each_response_whether_it_ended_and_fields_that_it_takes():
    seen, fields = [], {"tests": [1], "level": 2}
    prompt = Prompt(row=4, text="say a", answer="a", split="train", fields=fields)
    tokens = TOKENIZER.encode_answer("a")
    samples = [sample(*tokens), sample(*tokens[:1], finish="length")]

    def one(response, answer, *, finished, level):
        seen.append((response, answer, finished, level))
        return 1

    def every(response, answer, *, finished, **rest):
        seen.append(rest)
        return 0

    assert asyncio.run(Scorer(one, TOKENIZER)(0, prompt, samples)) == (1.0, 1.0)
    Scorer(every, TOKENIZER).rewards(prompt, samples[:1])
    assert Scorer(position_reward, TOKENIZER).rewards(prompt, samples[:1]) == (1.0,)
    assert seen == [("a", "a", True, 2), ("a", "a", False, 2), fields]
    held_out = Prompt(row=7, text="c", answer="b", split="held_out", fields={"tests": []})
    prompts = PromptSet(train=(prompt,), held_out=(held_out,))
    Verifier(every).check(prompts)
    Verifier(position_reward).check(prompts)
    with pytest.raises(DataError, match="line 8 of the prompts: no field 'level'"):
        Verifier(one).check(prompts)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.5, 3.0, None, "much"])
def test_a_reward_that_is_no_number_from_0_to_1_is_refused_before_a_run_and_in_it(value):
    prompts = PromptSet(train=tuple(PROMPTS), held_out=tuple(PROMPTS[:1]))
    said = rf"task.reward returned {value!r} for line 1 of the prompts and the response 'a'; allow"
    with pytest.raises(ConfigError, match=said):
        Verifier(lambda response, answer, *, finished: value).check(prompts)

    def later(response, answer, *, finished):
        return 1 + 1e-15 if finished else value

    tokens = TOKENIZER.encode_answer("a")
    assert Scorer(later, TOKENIZER).rewards(PROMPTS[0], [sample(*tokens)]) == (1 + 1e-15,)
    with pytest.raises(ConfigError, match=said):
        Scorer(later, TOKENIZER).rewards(PROMPTS[0], [sample(*tokens[:1], finish="length")])


def test_a_verifier_that_cannot_be_called_or_raises_is_told_with_what_it_got():
    prompts = PromptSet(train=tuple(PROMPTS), held_out=tuple(PROMPTS[:1]))
    with pytest.raises(
        ConfigError, match=r"called as reward\(response, answer, finished=…\): .*'f"
    ):
        Verifier(lambda response, answer: 1.0).check(prompts)

    def fragile(response, answer, *, finished):
        return 1 / len(response)

    with pytest.raises(ConfigError, match=r"raises ZeroDivisionError for line 1 .* response '': "):
        Verifier(fragile).check(prompts)


def test_settings_of_the_controller_are_those_of_the_configuration():
    config = load_config(None, ["run.mode=async", "controller.restarts=7"])
    settings = make_settings(config)
    assert (settings.target_groups, settings.group_size, settings.restarts) == (32, 8, 7)
    assert settings.groups_per_call == 16, "half of a step's"
    assert (settings.minibatches, settings.logprobs, config.last_version) == (1, "reference", 600)
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
