"""Each check of state catches the bug that was planted for it; right adapters pass all of them."""

from __future__ import annotations

import pytest
import torch
from ranks import needs_release

from megatron_idempotent.proof.certify import STATE_CHECKS, certify, layout, run
from megatron_idempotent.proof.certify.layouts import resharded
from megatron_idempotent.proof.certify.states import first_difference

pytest.importorskip("psutil", reason="megatron.core.dist_checkpointing needs psutil, undeclared")

needs_release((0, 16), "releases before 0.16 cannot save torch's Adam of today")

pytestmark = pytest.mark.full
WEEKLY = pytest.mark.exhaustive
FORMATS = "megatron_idempotent.proof.certify.checkpoints"
ALONE, TWO, MIXED = "bf16-distopt", "dp2-bf16-distopt", "moe-fp16-distopt"

#: The bug, the check that it was planted for, where, and what is said of it.
OF_CHECKS = [
    ("SaveDraws", "save-and-go-on", ALONE, "after save() rank 0 has other random: torch"),
    ("AllocatesOnce", "load-into-new-model", ALONE, "has other optimizer"),
    ("KeepsForeignMoments", "load-into-live-run", ALONE, "has other optimizer"),
    ("LoadsOnce", "rollback", ALONE, "after the second load() in place rank 0 has other optimizer"),
    ("KeepsFirstOfSteps", "saved-again", ALONE, "after load() of a later save() after as many"),
    ("WritesLate", "async-save", ALONE, "rank 0 has other weights"),
    ("LeavesMains", "load-weights-alone", ALONE, "the whole model has another "),
    ("RemembersItsSaves", "load-into-new-process", ALONE, "has other optimizer"),
    ("LosesMomentsOnOtherDP", "reshard-dp", TWO, "the whole model has another "),
    ("LosesMomentsOnOtherTP", "reshard-tp", ALONE, "the whole model has another "),
    ("LosesMomentsFirstOnOtherTP", "reshard-tp", ALONE, "a load that failed (file missing) rank 0"),
    ("LosesMomentsOnOtherPP", "reshard-pp", ALONE, "the whole model has another "),
    ("LosesMomentsOnOtherEP", "reshard-ep", "ep2-bf16-distopt", "the whole model has another "),
    ("LosesMomentsOnOtherCP", "reshard-cp", ALONE, "the whole model has another "),
    ("AddsSteps", "keeps-scheduler", ALONE, "has other scheduler: num_steps is 7 instead of 3"),
    ("ForgetsTracker", "keeps-random", "tp2-bf16-distopt", "has other random: tracker"),
    ("ForgetsScale", "keeps-loss-scale", MIXED, "has other loss scale: of optimizer 0"),
    ("ForgetsBuffers", "keeps-expert-bias", MIXED, "has other expert bias"),
    ("ForgetsLogs", "keeps-auxiliary-losses", MIXED, "has other auxiliary losses"),
    ("CountsOn", "keeps-counters", ALONE, "has other counters: steps is 3 instead of 2"),
    ("LosesMomentsAlone", "offload-one-part", ALONE, "after offload(only='optimizer')"),
    ("OffloadsOnce", "offload-again", ALONE, "after another offload rank 0 has other optimizer"),
    ("LeavesFrozenOut", "saved-while-frozen", ALONE, "weights are frozen rank 0 has other weights"),
    ("StepsFrozen", "saved-while-frozen", ALONE, "after a step while it is frozen "),
    ("OneRankKnowsOfWrites", "failed-save", TWO, "takes the run for saved"),
    ("MissingIsNew", "failed-load-file-missing", ALONE, "load() raises nothing on rank 0"),
    ("RemembersWhatItWrote", "failed-load-file-missing", ALONE, "load() raises nothing on rank 0"),
    ("EmptiesFirst", "failed-load-file-truncated", ALONE, "rank 0 has other weights"),
    ("RankZeroLooks", "failed-load-rank-cannot-read", TWO, "load() raises nothing on rank 0"),
]
#: The same of bugs that nothing shows but what a run varies, or that come of more than one call.
MORE = [
    ("ForgetsPython", "keeps-random", ALONE, "has other random: python"),
    ("ForgetsNumPy", "keeps-random", ALONE, "has other random: numpy"),
    ("ForgetsExperts", "keeps-random", MIXED, "has other random: tracker expert-parallel-rng"),
    ("ForgetsGrowth", "keeps-loss-scale", MIXED, "growth_tracker is 0 instead of 2"),
    ("ForgetsHysteresis", "keeps-loss-scale", MIXED, "hysteresis_tracker is 2 instead of 1"),
    ("RoundsBiases", "keeps-expert-bias", MIXED, "has other expert bias"),
    ("CountsIterations", "load-into-new-model", ALONE, "step is 2.0 instead of 12.0"),
    ("SeedsAnewAsync", "async-save", ALONE, "has other random: python"),
    ("StartsAnewAsync", "async-save", ALONE, "has other scheduler: num_steps is 1 instead of 3"),
    ("WritesFirstAsync", "async-save", ALONE, "load() of a later asynchronous save rank 0 has"),
    (
        "WritesInVain",
        "failed-save",
        ALONE,
        "save_async() where rank 0 could not write raises nothing",
    ),
    ("FailsForGood", "failed-save", ALONE, "RuntimeError in tests/proof/certify/planted_state.py"),
    ("ForgetsBetas", "keeps-scheduler", ALONE, "has other scheduler"),
    ("FailedLoadArmsStep", "failed-load-file-missing", ALONE, "after a load that failed"),
    ("EmptiesFactors", "load-into-new-model", ALONE, "has other "),
    ("RestMayMiss", "failed-load-file-missing", ALONE, "although 2-2.rest.0 is missing rank 0 has"),
    ("PutsByHalves", "failed-load-file-missing", ALONE, "a load that failed (a file is missing; "),
    (
        "SavesElsewhere",
        "load-into-new-model",
        ALONE,
        "save() has left 0 bytes below subject.folder",
    ),
    ("ReadsRankZeros", "failed-load-file-missing", TWO, "is missing, and load() raises nothing"),
    ("EmptyIsNothing", "failed-load-file-truncated", ALONE, " is empty, and load() raises nothing"),
    ("WeightsForGood", "load-weights-alone", ALONE, "after load() after load_weights() rank 0 has"),
    ("WeightsIfThere", "failed-load-file-missing", ALONE, "a load_weights() although "),
    ("ExportsBySteps", "rollback", ALONE, "export() gives other weights than the model has"),
    ("CopiesAfterSteps", "offload-again", ALONE, "an offload after load() rank 0 has other opt"),
    ("CopiesAtTheEnd", "offload-again", ALONE, "failed midway after a step rank 0 has other opt"),
    ("OffloadsAway", "offload-again", ALONE, "after two offloads rank 0 has other optimizer"),
    ("OffloadKnownAtTheEnd", "offload-again", ALONE, "are on the host"),
    ("LosesSchedulerOnOtherDP", "reshard-dp", TWO, "has other scheduler: num_steps is 0"),
    ("LosesCountersOnOtherDP", "reshard-dp", TWO, "has other counters: iteration is 0"),
    ("LosesScaleOnOtherDP", "reshard-dp", "dp2-fp16-distopt", "has other loss scale"),
    ("LosesBiasesOnOtherPP", "reshard-pp", "moe-bf16-distopt", "has other expert bias"),
    ("SharesWithThread", "async-save", ALONE, "load() of an asynchronous save rank 0 has other "),
    (
        "SharesWithOwnThread",
        "async-save",
        ALONE,
        "load() of an asynchronous save rank 0 has other ",
    ),
    ("SharesViewsWithThread", "async-save", ALONE, "an asynchronous save rank 0 has other weights"),
    ("HearsNoThread", "failed-save", ALONE, "could not write raises nothing, and load() of it Run"),
    (
        "WaitsForItsThread",
        "failed-save",
        ALONE,
        "rank 0 could not write, and saved() has not returned after 20 s; rank 0 is in ",
    ),
    (
        "LeavesOutItsBarrier",
        "failed-save",
        TWO,
        "rank 0 could not write, and save() has not returned after 20 s; rank 1 is waiting in "
        "barrier(), called in tests/proof/certify/planted_state.py:",
    ),
    ("OrdersByHash", "load-into-new-process", ALONE, "RuntimeError in tests/proof/certify/plante"),
    ("NamesByHash", "load-into-new-process", ALONE, "No such file or directory: "),
    ("FallsBack", "failed-load-file-missing", ALONE, "load() raises nothing on rank 0"),
    ("FallsBack", "failed-load-file-truncated", ALONE, "load() raises nothing on rank 0"),
    ("LosesGradients", "offload-one-part", ALONE, "an offload of gradients in an open step"),
    ("DoublesGradients", "offload-one-part", ALONE, "an offload of gradients in an open step"),
]
#: One of each kind; the rest each week.
PROMPT = {"save-and-go-on", "rollback", "load-weights-alone", "reshard-tp", "failed-save"}
#: Takes as long as another one, in which a rank is left alone too.
SLOW = {"WaitsForItsThread"}


@pytest.fixture(autouse=True)
def importable(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))


def test_every_check_of_state_has_a_bug_that_it_catches():
    assert [*dict.fromkeys(check for _, check, _, _ in OF_CHECKS)] == [*STATE_CHECKS]


@pytest.mark.parametrize(
    ("bug", "check", "where", "said"),
    [
        pytest.param(*row, marks=() if row[1] in PROMPT and row[0] not in SLOW else WEEKLY)
        for row in [*OF_CHECKS, *MORE]
    ],
)
def test_a_check_catches_its_bug(megatron_rank_pool, bug, check, where, said):
    fault, *_ = run.outcome_of(
        megatron_rank_pool, f"planted_state:{bug}", STATE_CHECKS[check], layout(where)
    )
    assert said in fault


def test_a_tensor_of_another_type_is_a_difference():
    whole, half = {"bias": torch.zeros(2)}, {"bias": torch.zeros(2, dtype=torch.float16)}
    assert first_difference(whole, half) == "bias is torch.float16 instead of torch.float32"
    assert first_difference(whole, {"bias": torch.zeros(2)}) is None


def test_a_run_that_skips_its_steps_shows_nothing(megatron_rank_pool):
    how = {"checks": ["rollback"], "layouts": ["fp16-distopt"], "pool": megatron_rank_pool}
    (found,) = certify("planted_state:Overflows", **how)
    assert found.fault == "the step was skipped, and shows nothing: a gradient is not finite"


def failed(pool, adapter, where):
    found = list(certify(adapter, checks=STATE_CHECKS, layouts=[where], pool=pool))
    assert any(each.verdict == "passed" for each in found)
    return {each.check: each.fault for each in found if each.verdict == "failed"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("bug", "check", "where", "said"), OF_CHECKS)
def test_no_other_check_catches_it(megatron_rank_pool, bug, check, where, said):
    found = failed(megatron_rank_pool, f"planted_state:{bug}", where)
    assert [*found] == [check], found


@pytest.mark.parametrize(
    ("adapter", "check", "where"),
    [
        ("planted_state:Everything", "load-weights-alone", ALONE),
        ("planted_state:Everything", "offload-one-part", ALONE),
        # Weights are in no buffer of their own.
        ("planted_state:Everything", "offload-one-part", "bf16"),
        # Gradients are kept over an offload in an open step, and not refused.
        ("planted_state:KeepsGradients", "offload-one-part", ALONE),
        ("planted_state:Threaded", "failed-save", TWO),
        ("planted_state:InMemory", "failed-load-file-missing", ALONE),  # there are no files
        (f"{FORMATS}:DPReshardable", "load-into-live-run", ALONE),
        (f"{FORMATS}:LowRank", "load-into-new-model", ALONE),
        (f"{FORMATS}:LowRank", "rollback", TWO),  # two steps that nobody looks between
        *(
            pytest.param(*row, marks=WEEKLY)
            for row in (
                ("planted_state:RefusesSecondOfSteps", "saved-again", ALONE),
                ("planted_state:Threaded", "async-save", ALONE),
                ("planted_state:CopiesInThread", "async-save", ALONE),
                ("planted_state:OwnThread", "failed-save", TWO),
            )
        ),
    ],
)
def test_savers_that_are_right_are_not_accused(megatron_rank_pool, adapter, check, where):
    (found,) = certify(adapter, checks=[check], layouts=[where], pool=megatron_rank_pool)
    assert (found.verdict, found.fault) == ("passed", "")


#: What each format does not promise is in the adapter's `cannot`. `ModelSpace` is for releases
#: whose writer takes it; docs/state.md has them.
MEGATRON = ("DPReshardable", "FullyReshardable", "OnHost", "LowRank")
OF_TRAINING = ("Training", "TrainingFully", "Legacy")


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", [TWO, "ep2-fp16-distopt"])
@pytest.mark.parametrize("name", [*MEGATRON, *OF_TRAINING])
def test_megatron_s_formats_keep_all_that_they_promise(megatron_rank_pool, name, where):
    if name in OF_TRAINING:
        pytest.importorskip("megatron.training", reason="wheels have it from 0.17 on")
    assert not failed(megatron_rank_pool, f"{FORMATS}:{name}", where)


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", [TWO, MIXED, "dp2-distopt", "tp2-pp2", "ep2-fp16", "vpp2-bf16"])
def test_an_adapter_that_keeps_everything_passes(megatron_rank_pool, where):
    assert not failed(megatron_rank_pool, "planted_state:Everything", where)


@pytest.mark.parametrize(
    ("name", "word", "found"),
    [
        ("dp2-distopt", "dp", "dp4-distopt"),
        ("dp4", "dp", "dp2"),
        ("dp2-bf16", "tp", "dp1-tp2-bf16"),
        ("tp2-bf16", "tp", "tp1-dp2-bf16"),
        ("dp2-moe", "ep", "dp2-ep2-moe"),
        ("ep2", "ep", "ep4"),
        ("dp2-ep2", "ep", "dp2-ep1"),
        ("dp2", "ep", None),
    ],
)
def test_a_layout_is_resharded_by_one_word(name, word, found):
    made = resharded(layout(name), word)
    assert (made and made.name) == found
