"""The order of things in a run in which nothing fails."""

import asyncio
import json

import pytest
from toy import Toy, ToyStore, conserved, run_virtually
from toy_faults import FaultyPlane, cut_off

from megatron_idempotent.rl.controller import (
    ControllerSettings,
    FirstReadySampler,
    InOrderSampler,
    SettingsError,
    StrictSampler,
    WindowedSampler,
)
from megatron_idempotent.rl.metrics.timeline import Timeline


def test_a_group_goes_through_log_probs_and_microbatch_before_the_next_one_comes():
    toy = Toy(sampler=InOrderSampler(0), logprobs="both").run(1)
    assert toy.kinds("logprobs", "begin", "microbatch", "finish") == [
        ("logprobs", "policy", 0),
        ("logprobs", "reference", 0),
        ("begin",),
        ("microbatch", 0),
        ("logprobs", "policy", 1),
        ("logprobs", "reference", 1),
        ("microbatch", 1, "last"),
        ("finish",),
    ]
    assert toy.recipe.given == [{"policy": "policy", "reference": "reference"}] * 2


@pytest.mark.parametrize(
    ("asked", "given"), [("none", {}), ("policy", {"policy"}), ("reference", {"reference"})]
)
def test_only_the_log_probs_that_are_asked_for_are_computed(asked, given):
    toy = Toy(logprobs=asked).run(1)
    assert [set(each) for each in toy.recipe.given] == [set(given)] * 2


def test_one_finish_and_one_clearing_per_optimizer_step_and_one_publish_per_outer_step():
    noted = []

    async def clear(real, group_ids):
        noted.append(list(group_ids))
        await real(group_ids)

    plane = FaultyPlane(clear=clear)
    toy = Toy(groups=2, minibatches=3, plane=plane).run(6)
    assert [event[0] for event in toy.kinds("finish", "publish")] == (
        ["publish"] + (["finish"] * 3 + ["publish"]) * 2
    )
    assert [version for _, version in toy.kinds("publish")] == [0, 3, 6]
    assert toy.published() == [None, None, 3, None, None, 6]
    evicted = toy.status.counts["evicted"]
    cleared = [group_id for ids in noted for group_id in ids]
    assert len(cleared) == len(set(cleared)) == 12 + evicted
    steps = [sorted(step) for step in toy.policy.steps]
    assert [ids for ids in noted if ids in steps] == steps


def test_the_next_step_trains_while_weights_are_published_and_updates_behind_it():
    toy = Toy(sampler=WindowedSampler(4), groups=3, seconds=0.1)
    toy.generator.publish_seconds = 5.0
    toy.run(6)
    order = [event[0] for event in toy.kinds("microbatch", "publish", "finish")]
    first = order.index("finish")
    assert order[first + 1 : first + 6] == ["microbatch"] * 3 + ["publish", "finish"]
    assert toy.published() == [1, 2, 3, 4, 5, 6]
    row = dict(toy.logger.rows)[2]
    assert row["timing/train/exposed_sync_s"] == pytest.approx(5.0 - 4 * 0.2)
    waiting = Toy(sampler=InOrderSampler(4), groups=3, seconds=0.1)
    waiting.generator.publish_seconds = 5.0
    waiting.run(3)
    order = [event[0] for event in waiting.kinds("microbatch", "publish", "finish")]
    assert order[1:] == (["microbatch"] * 3 + ["finish", "publish"]) * 3


def test_groups_that_are_handed_over_together_are_those_that_were_there():
    toy = Toy(sampler=InOrderSampler(1), groups=4, groups_per_call=4).run(3)
    assert toy.kinds("microbatch") == [
        ("microbatch", 0, 1, 2, 3, "last"),
        ("microbatch", 4, 5, 6, 7, "last"),
        ("microbatch", 8, 9, 10, 11, "last"),
    ]


def test_a_run_to_where_it_stands_does_nothing():
    toy = Toy().run(2)
    before = len(toy.events)
    toy.run(2)
    assert toy.events[before:] == []
    assert Toy().run(0).kinds("begin", "finish", "generate") == []


def test_runs_one_after_the_other_are_one_run():
    whole = Toy(sampler=InOrderSampler(1), groups=3).run(6)
    parts = Toy(sampler=InOrderSampler(1), groups=3).run(2).run(4).run(6)
    assert parts.policy.steps == whole.policy.steps
    assert parts.status.trainer_version == 6
    loose = Toy(groups=3).run(2).run(6)
    assert len(set(loose.trained())) == 18
    assert conserved(loose.status)


def test_metrics_are_logged_once_per_version_with_the_names_of_phases():
    async def evaluate(version):
        return {"evaluation/reward": float(version)} if version % 2 == 0 else {}

    toy = Toy(evaluate=evaluate, logprobs="policy").run(4)
    assert [step for step, _ in toy.logger.rows] == [0, 1, 2, 3, 4]
    assert [m.get("evaluation/reward") for _, m in toy.logger.rows] == [0, None, 2, None, 4]
    last = toy.logger.rows[-1][1]
    assert last["train/loss"] == last["train/reward"] == 0.5
    phases = ("prepare_logprobs", "advantage_pump", "policy_training", "clear_samples")
    for phase in (*phases, "sync_weights"):
        assert f"timing/train/{phase}_s" in last
    assert last["timing/train/policy_training_s"] == pytest.approx(0.8)  # begin, two, finish
    assert last["rollouts/unaccounted"] == 0
    assert toy.published() == [None, 1, 2, 3, 4], "of its own publish, beside a step or not"


def test_ping_answers_while_a_step_trains():
    toy = Toy(groups=2, step_seconds=50.0)
    answers = []

    async def main():
        running = asyncio.ensure_future(toy.controller.run(1))
        while not running.done():
            answers.append(await toy.controller.ping())
            await asyncio.sleep(1.0)
        answers.append(await toy.controller.ping())

    run_virtually(main())
    training = [each for each in answers if each.doing == "microbatch"]
    assert len(training) > 50
    assert (answers[-1].trainer_version, answers[-1].state) == (1, "ended")
    assert {each.state for each in training} == {"running"}
    assert training[-1].step_groups == 1
    assert max(each.idle_s for each in training) > 40


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"target_groups": 6}, "target_groups 6 train_global_batch_size 16 group_size 4 steps"),
        ({"train_global_batch_size": 18}, "train_global_batch_size 18 group_size 4"),
        ({"group_size": 4.0}, "group_size 4.0 whole"),
        ({"logprobs": "old"}, "logprobs 'old' policy reference both none"),
        ({"stall_s": 100.0}, "stall_s 100.0 group_attempts 3 group_timeout_s 300.0 900"),
        ({"drain_s": float("nan")}, "drain_s nan above 0"),
        (
            {"min_groups_per_call": 3, "groups_per_call": 2},
            "min_groups_per_call 3 groups_per_call 2",
        ),
        ({"groups_per_call": 5}, "groups_per_call 5 4 groups"),
        ({"stal_s": 9}, "unknown stal_s 9 stall_s?"),
        ({"restarts": -1, "step_attempts": 0}, "restarts -1 step_attempts 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(changed, named):
    with pytest.raises(SettingsError) as caught:
        sizes(**changed)
    assert [word for word in named.split() if word not in str(caught.value)] == []


def test_a_capacity_or_a_window_below_what_the_sampler_needs_is_refused():
    assert sizes().minibatches == 2
    with pytest.raises(SettingsError, match=r"group_size .*missing"):
        ControllerSettings()
    with pytest.raises(SettingsError, match=r"capacity is 8; allowed: 12 "):
        sizes(capacity=8).checked_capacity(WindowedSampler(2))
    with pytest.raises(SettingsError, match=r"target_groups 8 .* 1 versions old"):
        sizes().checked_capacity(StrictSampler())
    assert sizes().checked_capacity(WindowedSampler(2)) == 12


def sizes(**changed):
    fixed = {"target_groups": 8, "group_size": 4, "train_global_batch_size": 16}
    return ControllerSettings(**fixed | changed)


def test_sizes_that_are_not_given_follow_from_those_that_are():
    def sizes(**given):
        found = ControllerSettings(group_size=4, **given)
        assert found.minibatches == found.target_groups // (found.train_global_batch_size // 4)
        return found.target_groups, found.train_global_batch_size, found.minibatches

    assert sizes() == (32, 128, 1)
    assert sizes(target_groups=6) == (6, 24, 1)
    assert sizes(train_global_batch_size=16) == (4, 16, 1)
    assert sizes(target_groups=8, train_global_batch_size=16) == (8, 16, 2)
    for wrong in ({"train_global_batch_size": 2}, {"target_groups": -1}):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            sizes(**wrong)


def test_a_checkpoint_goes_on_where_it_was_written():
    store = ToyStore()
    whole = Toy(sampler=InOrderSampler(1), groups=3, store=store, checkpoint_every=2).run(5)
    stopped = ToyStore()
    first = Toy(sampler=InOrderSampler(1), groups=3, store=stopped, checkpoint_every=2).run(2)
    second = Toy(sampler=InOrderSampler(1), groups=3, store=stopped, checkpoint_every=2)
    assert run_virtually(second.controller.resume()) == 2
    second.run(5)
    assert first.policy.steps + second.policy.steps == whole.policy.steps
    assert second.status.counts == whole.status.counts
    # The weights of the checkpoint go out again under the version that they had.
    assert [version for _, version in first.kinds("publish")] == [0, 1, 2]
    assert [version for _, version in second.kinds("publish")] == [2, 3, 4, 5]


def test_prompts_that_have_run_out_are_all_trained_and_the_last_weights_published():
    assert Toy(prompts=7, groups=2).run(10).status.counts["trained"] == 6, "whole steps alone"
    toy = Toy(sampler=FirstReadySampler(), capacity=20, prompts=6, groups=2)
    toy.generator.publish_seconds = 5.0
    toy.run(10)
    assert sorted(toy.trained()) == list(range(6))
    # The last two go out while the run finds that there are no more prompts.
    assert [version for _, version in toy.kinds("publish")] == [0, 1, 2, 3]


def test_prompts_that_were_being_answered_at_a_checkpoint_are_asked_again_behind_it():
    store = ToyStore()
    cut_off(Toy(groups=3, store=store), lambda status: status.counts["generating"] >= 4)
    asked = store.kept["buffer"]["unfinished"]
    assert asked
    second = Toy(groups=3, store=store)
    run_virtually(second.controller.resume())
    second.run(6)
    assert [group_id for _, group_id in second.kinds("generate")][: len(asked)] == asked


def test_groups_that_are_generated_at_the_same_time_have_tracks_of_their_own(tmp_path):
    timeline = Timeline(tracks=("train", "weights", "rollouts"))
    Toy(groups=4, timeline=timeline).run(6)
    timeline.write(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    ends, most = {}, 12  # the capacity: a window of two steps, and the step itself
    groups = [event for event in events if event["name"].startswith("group ")]
    for event in sorted(groups, key=lambda event: event["ts"]):
        track = names[event["tid"]]
        assert ends.get(track, 0) <= event["ts"], f"two groups at once on {track}"
        ends[track] = event["ts"] + event["dur"]
    assert len(groups) >= 24
    assert set(ends) <= {f"rollouts {number}" for number in range(1, most + 1)}
    assert len(ends) > 1
