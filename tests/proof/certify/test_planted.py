"""Each check catches the bugs that were planted for it; right adapters pass all of them."""

import random
import re

import pytest
from ranks import RELEASE

from megatron_idempotent.proof.certify import CHECKS, LAYOUTS, certify, layout, run

pytestmark = pytest.mark.full

OWN = "megatron_idempotent.proof.certify.adapters"
OFFLOADS = pytest.mark.skipif(RELEASE < (0, 16), reason="gradient buffers can be offloaded later")
WEEKLY = pytest.mark.exhaustive


def weekly(*row, **how):
    return pytest.param(*row, marks=WEEKLY, **how)


OFF, TIMES = "the gradient is off by ", "the gradient is "

#: The bug, the check that it was planted for, and what is said of it.
OF_CHECKS = [
    ("TwiceTheLoss", "whole-step", "the gradient is 2 times the right one"),
    ("MeanOfMeans", "counts", OFF),
    ("EvenSequences", "packed-lengths", OFF),
    ("KeepsTheLastCall", "split-step", OFF),
    ("planted_steps:DropsTheRest", "rows-left-over", f"9 and 4 rows: {OFF}"),
    ("FirstStepsDivisor", "sizes-change", " times the right one"),
    ("MeanOfReplicas", "uneven-replicas", OFF),
    ("RefusesNoRows", "replica-without-rows", "IndexError in "),
    ("SixAtMost", "drawn-sizes", OFF),
    ("StepOverZero", "nothing-valid", "the gradient is NaN"),
    ("NeverGathers", "unwatched-steps", " than its replica"),
    ("CallsCountAlike", "auxiliary-losses", OFF),
    ("LogprobsZeroGradients", "logprobs-in-mid-step", "the step has moved no parameter"),
    ("ExportRounds", "export-in-mid-step", "a step that has not finished has changed"),
    ("AbortUpdates", "abort-and-retry", "abort() has changed"),
    ("SwallowsErrors", "failure-on-one-rank", "rank 0 finished the step"),
    ("UpdatesWithNaN", "nan", "the step updated all the same"),
    ("WarmsUpTwice", "second-run", OFF),
    ("ForgetsMoments", "resume", OFF),
    ("LosesMomentsOnTheHost", "offload-between-steps", OFF),
    ("BringsNothingBackForLogprobs", "logprobs-while-offloaded", "after onload(training="),
    ("DropsGradientsOffloaded", "offload-in-mid-step", "the step has moved no parameter"),
    ("ForgetsTheRank", "low-rank-adapters", OFF),
    ("PromisesBits", "same-bits", "in another order and two calls give other bits"),
]
#: Checks that fail with a bug too.
ALSO = {
    "FirstStepsDivisor": {"uneven-replicas", "replica-without-rows"},
    "MeanOfReplicas": {"replica-without-rows"},
}
#: Steps of many sizes, which many bugs show in.
DRAWN = {"drawn-sizes", "nothing-valid", "unwatched-steps", "sizes-change", "rows-left-over"}
#: The patches gather what is pending in a window.
ON_STOCK = {"unwatched-steps"}

#: The bug, the check that catches it, where, and what is said of it.
OTHERS = [
    # The other rank only learns that this one has left, and that says less.
    ("OneRankReportsAnotherNorm", "whole-step", "dp2", "finish() reports the gradient norm "),
    weekly("ReportsAnotherLoss", "whole-step", "dp2", "finish() reports the loss "),
    ("Bfloat16Sums", "whole-step", "dp2", "the gradient is off by 0."),
    ("Clips", "whole-step", "dp1", "set to clip gradients (clip_grad is 0.1): certify judges"),
    ("ClipsItself", "whole-step", "dp2", "0.125 times the right one, and the norm that finish()"),
    ("planted_more:EvalLeftOn", "logprobs-in-mid-step", "dp1", "the step trains in eval mode: "),
    ("SaysThatItAverages", "whole-step", "moe", TIMES),
    # Packs, rows that ranks share, FSDP2.
    ("SeesTheWholePack", "whole-step", "dp2-packs", TIMES),
    weekly("PositionsGoOn", "whole-step", "dp2-packs", TIMES),
    weekly("PredictsTheNextSequence", "whole-step", "dp2-packs", TIMES),
    ("CountsPadding", "whole-step", "dp2-packs", TIMES),
    weekly("MeanOfPacks", "packed-lengths", "dp2-packs", TIMES),
    ("LosesASequence", "whole-step", "moe-packs", "lack 1 of the step's sequences"),
    ("CutsInHalves", "whole-step", "cp2", OFF),
    weekly("CountsOnEachRank", "whole-step", "cp2", "0.5 times the right one"),
    ("ReducesTheLastCallAlone", "split-step", "dp2-fsdp2", OFF),
    # Means over sequences.
    ("MeanOverPositions", "counts", "dp2-sequences", OFF),
    weekly("CountsMaskedSequences", "counts", "dp2-sequences", "the gradient is 0.875 times"),
    ("WeighsExpertsByPositions", "whole-step", "dp2-moe-sequences", OFF),
    # Half precision.
    *(
        pytest.param(bug, check, f"dp2-{dtype}-distopt", said, marks=marks)
        for dtype, prompt in (("bf16", ()), ("fp16", WEEKLY))
        for bug, check, said, marks in (
            ("TwiceTheLoss", "whole-step", "times the right one", WEEKLY),
            ("MeanOfMeans", "counts", OFF, prompt),
            ("ForgetsMainParameters", "resume", "save() and load() has changed", prompt),
            ("UpdatesTheModelAlone", "whole-step", "its main parameter, rounded", prompt),
        )
    ),
    # Offloads.
    *(
        pytest.param(bug, check, where, said, marks=OFFLOADS)
        for bug, check, where, said in (
            ("OffloadsNothing", "offload-between-steps", "dp1", "has moved and freed none of "),
            ("LeavesMomentsOnTheHost", "offload-between-steps", "dp1", " tensors are on the host"),
            ("LeavesGradientsFreed", "offload-between-steps", "dp1", " tensors have no memory, "),
            ("KeepsOneCopy", "logprobs-while-offloaded", "dp1", "log-probs differ from the "),
            ("OneRankRefusesTooLate", "offload-in-mid-step", "dp2", "is refused on some ranks"),
        )
    ),
    (
        *("NudgesTheBase", "low-rank-adapters", "dp2"),
        "the step has moved decoder.layers.0.mlp.linear_fc1.to_wrap.weight, which is frozen",
    ),
    ("SharedFactorUnmarked", "low-rank-adapters", "tp2", ".weight than its replica"),
]

#: Bugs of `planted_more.py`, which depend on sizes, places and time, by the check that catches each
#: and the least layout on which it is wrong. A plus stands before one of each kind; others run each
#: week.
MORE = {
    ("drawn-sizes", "dp1"): (
        "MeanOfCalls RowsWeighCalls OddMicrobatchDropped SixMicrobatches EightOfACall "
        "+FourthCallLost EmptyCallEnds EmptyCallZeroes EmptyCallForgetsTokens PadsByRepeating "
        "CountsInBF16 CountsTheFirstToken LossOfCalls CleanAfterEmpty"
    ),
    ("nothing-valid", "dp1"): (
        "LoneCallLost +NothingValidIsNaN NothingValidInAStep WeightsOutOfStep StopsAtMasked "
        "MaskedBeginsAgain MaskOfTheFirstStep"
    ),
    ("drawn-sizes", "dp2"): "SingleCountedTwice CutsToTheLeast TokensOfRankZero",
    ("nothing-valid", "dp2"): "RankWithoutTokensStays",
    ("nothing-valid", "moe"): "SkipsMasked",
    ("drawn-sizes", "pp2"): "RepeatsToFillStages",
    ("packed-lengths", "packs"): "LengthsSortedAlone",
    ("failure-on-one-rank", "dp1"): (
        "SwallowsLaterCalls SwallowsBackward LastMicrobatchDecides SecondErrorIsQuiet "
        "KeepsFailedWindow UndoesTheLastCall FrozenByFailure"
    ),
    ("failure-on-one-rank", "pp2"): "SwallowsLaterLosses",
    ("failure-on-one-rank", "dp2"): "+OnlyLastRankIsHeard DrainsCollectives ZeroesWhereItFailed",
    ("nan", "dp2"): "+NaNOfRankZero DropsItsOwnNaN",
    ("nan", "dp1"): "NaNOfTheFirst NaNUnlessInTheLastCall NaNClearsMoments",
    ("abort-and-retry", "dp1"): "AbortKeepsQueue EvalLeftByAbort HooksStayAfterAbort",
    ("unwatched-steps", "dp2-distopt"): "NeverGathers GathersLate",
    ("logprobs-in-mid-step", "dp2-distopt"): "LogprobsOfStale HooksLeftOff",
    ("export-in-mid-step", "dp2-distopt"): "+ExportsStale",
    ("export-in-mid-step", "dp1"): "ExportsZeros ExportsAPart ExportsTheFirst ExportsTheLast",
    ("logprobs-in-mid-step", "dp1"): "EvalLeftOn LogprobsOfTheStep",
    ("logprobs-in-mid-step", "fp16"): "ScaleFuncLost",
    ("second-run", "dp1"): "FifthStepForgets",
}
#: Bugs of `planted_steps.py`, by the check that catches each, the layout, and what is said of it.
STEPS = {
    ("rows-left-over", "dp1", "the gradient is off by "): "RestWeighsAsMuch PadsTheRest",
    ("logprobs-in-mid-step", "dp1", "log-probs differ "): (
        "+LogprobsStaySorted LogprobsOfEight +LogprobsOfContent +LogprobsOfATensor"
    ),
    ("resume", "dp1", "tensors that the next step has written to"): "+SavesLive",
    ("unwatched-steps", "dp1", "finish() says that it has not updated"): "+SkipsSpikes",
    ("drawn-sizes", "dp1", " times the right one"): "+ClipsItsOwn ClipsAtHundred",
    ("counts", "dp1", "the gradient is 0.1 times the right one"): "+CountsTenAtLeast",
    ("nan", "dp1", ", and the step updated all the same"): (
        "LooksForNaNAlone +LooksAtTheLossAlone LooksAtFourCalls"
    ),
    ("sizes-change", "bf16", "the gradient is 0.86"): "+SumsAsParameters",
    ("whole-step", "bf16", "the second moment of "): "+MomentsAsParameters",
    ("whole-step", "bf16", "the main value of "): "MainsAsParameters",
    ("sizes-change", "dp1", " times the right one"): "CountsInFloat16 +AddsUpCountsInFloat16",
    ("failure-on-one-rank", "dp1", " failed on rank 0 with a "): (
        "QuietAfterFourCalls LogsValueErrors LogsKeyErrors +LogsMemoryErrors LogsOutOfMemory "
        "LogsAssertions +LogsInterrupts +RunsAgain"
    ),
    ("unwatched-steps", "dp1", "the gradient is off by "): "+TwelfthKeepsGradients",
    ("whole-step", "dp1", "finish() returns "): (
        "FinishesWithNone FinishesWithDict +FinishesLater ReportsAWord"
    ),
    ("logprobs-in-mid-step", "dp1", "logprobs() returns "): (
        "LogprobsInAList +LogprobsTurned LogprobsNowhere"
    ),
    ("split-step", "dp2", "of call 2 of replica 0 count "): "+LosesASecondCall",
}


def rows(module, table):
    """The bugs of a table as rows; one without a plus before it runs each week only."""
    for (check, where, *said), bugs in table.items():
        for bug in bugs.split():
            marks = () if bug.startswith("+") else WEEKLY
            adapter = f"{module}:{bug.removeprefix('+')}"
            yield pytest.param(adapter, check, where, *said or [""], marks=marks)


def place_of(check, usual="dp2"):
    """The layout in which a bug was planted for a check."""
    if check in ON_STOCK:
        return "dp2-distopt"
    places = {"auxiliary": "dp2-moe", "packs": "dp2-packs", "replicas": "dp2"}
    return places.get(CHECKS[check].where, usual)


def fault_of(pool, adapter, check, where, **how):
    if ":" not in adapter:
        adapter = f"planted:{adapter}"
    return run.outcome_of(pool, adapter, CHECKS[check], layout(where), run.Options(**how))[0]


@pytest.fixture(autouse=True)
def importable(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))


def test_every_check_has_a_bug_that_it_catches():
    assert [check for _, check, _ in OF_CHECKS] == [*CHECKS]


@pytest.mark.parametrize(
    ("bug", "check", "where", "said"),
    [
        # One rank shows what needs no other replica.
        *((bug, check, place_of(check, "dp1"), said) for bug, check, said in OF_CHECKS),
        *OTHERS,
        *rows("planted_more", MORE),
        *rows("planted_steps", STEPS),
    ],
)
def test_a_check_catches_its_bug(megatron_rank_pool, bug, check, where, said):
    """Whatever the seed."""
    how = {"stock": bug == "NeverGathers", "seed": random.randrange(10**6)}
    fault = fault_of(megatron_rank_pool, bug, check, where, **how)
    assert fault, how
    assert said in fault, how


@pytest.mark.exhaustive
@pytest.mark.parametrize(("bug", "check", "said"), OF_CHECKS)
def test_no_other_check_catches_it(megatron_rank_pool, bug, check, said):
    found = certify(
        bug if ":" in bug else f"planted:{bug}",
        layouts=[place_of(check)],
        stock=check in ON_STOCK,
        pool=megatron_rank_pool,
    )
    others = DRAWN - {check}
    assert {each.check for each in found if each.verdict == "failed"} - others == {
        check
    } | ALSO.get(bug, set())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "place"),
    [
        *(("Loop", each) for each in ("dp1", "dp2", "dp2-distopt")),
        *((name, "dp2") for name in ("KnownTotals", "ReplaysAfterFailure", "SortsByLength")),
        *((name, each) for name in ("OneCallEach", "AllInOneCall") for each in ("dp2", "pp2")),
        *(("AbortRebuilds", each) for each in ("dp2", "dp2-distopt")),
        ("SumsOutside", "dp2-distopt"),
    ],
)
def test_a_right_adapter_in_an_unusual_style_passes(megatron_rank_pool, name, place):
    found = certify(f"planted_more:{name}", layouts=[place], pool=megatron_rank_pool)
    assert not {each.check: each.fault for each in found if each.verdict == "failed"}


TOLD_OF_PADDING = pytest.mark.skipif(RELEASE < (0, 16), reason="models are told of padding later")


@pytest.mark.parametrize(
    ("adapter", "check", "where"),
    [
        # A pack of each sequence, and padding that the model knows of, are right too.
        ("OneSequenceEach", "packed-lengths", "moe-packs"),
        weekly("OneSequenceEach", "abort-and-retry", "moe-packs"),
        pytest.param("TellsOfPadding", "packed-lengths", "moe-packs", marks=TOLD_OF_PADDING),
        # What a layout does not have is not told of it.
        ("SaysThatItAverages", "whole-step", "tied"),
        ("WeightRaises", "split-step", "pp2"),
        ("ReducesTheLastCallAlone", "whole-step", "dp2-fsdp2"),
        *(
            weekly(bug, check, "dp2-sequences")
            for bug, check in (
                *(("MeanOverPositions", each) for each in ("whole-step", "split-step")),
                *(("CountsMaskedSequences", each) for each in ("whole-step", "split-step")),
                ("WeighsExpertsByPositions", "counts"),
            )
        ),
        # An offload in an open step may keep gradients, or be refused.
        *(
            pytest.param(name, "offload-in-mid-step", where, marks=OFFLOADS)
            for name, where in (
                *(("KeepsGradients", "dp2"), ("OneRankRefuses", "dp2")),
                (f"{OWN}:FSDPSplitStep", "dp2-fsdp2"),
            )
        ),
    ],
)
def test_what_is_right_is_not_accused(megatron_rank_pool, adapter, check, where):
    assert not fault_of(megatron_rank_pool, adapter, check, where)


@pytest.mark.parametrize(
    ("adapter", "check", "where", "stock", "patched"),
    [
        # Stock Megatron drops gradients of an open step, and the patch refuses.
        (
            *("InParts", "offload-in-mid-step", "dp2-nooverlap"),
            *("the step has moved no parameter", ""),
        ),
        weekly(
            *("ZeroesBeforeLogprobs", "logprobs-while-offloaded", "dp2"),
            *("died with signal SIGSEGV", ""),
        ),
        *(
            weekly(f"{OWN}:Megatron", "offload-between-steps", where, "", None)
            for where in ("dp2", "dp2-distopt", "dp2-bf16")
        ),
        weekly("InParts", "split-step", "dp2-nooverlap", "", None),
    ],
)
def test_stock_megatron_is_judged_without_the_patches(
    megatron_rank_pool, adapter, check, where, stock, patched
):
    if RELEASE < (0, 16):
        pytest.skip("gradient buffers can be offloaded from 0.16 on")
    for on_stock, said in ((True, stock), (False, patched)):
        if said is None:
            continue
        fault = fault_of(megatron_rank_pool, adapter, check, where, stock=on_stock)
        assert said in fault
        assert bool(fault) == bool(said), fault


def test_a_rank_that_raises_is_named_where_the_others_wait(megatron_rank_pool, monkeypatch):
    monkeypatch.setattr(run, "DEADLINE_S", 3.0)
    assert re.fullmatch(
        r"rank 1 did not end within 3 s; on rank 0: RuntimeError in .*: the first rank .* begin; "
        r"rank 1 is waiting in new_group\(\), called in .*/agreement\.py:\d+ \(\w+\)",
        fault_of(megatron_rank_pool, "OneRankRaises", "whole-step", "dp2"),
    )


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ("AsyncFinish", ".finish is an async function, which certify does not await: run the "),
        ("KeepsAString", ".keeps is 'scheduler': it takes a tuple of names, some of 'scheduler', "),
        ("KeepsASchedule", r".keeps is \('schedule',\): it takes .* of 'scheduler', 'random', "),
        ("ReshardsData", r".reshards is \('data',\): it takes .* of 'dp', 'tp', 'pp', 'ep', 'cp'"),
    ],
)
def test_what_an_adapter_says_and_cannot_say_is_named(megatron_rank_pool, bug, said):
    with pytest.raises(ValueError, match=said):
        list(certify(f"planted_steps:{bug}", layouts=["dp1"], pool=megatron_rank_pool))


def test_a_fault_is_placed_by_what_came_before_the_step_and_by_ranks(megatron_rank_pool):
    fault = fault_of(
        megatron_rank_pool, "planted_more:FrozenByFailure", "failure-on-one-rank", "dp1"
    )
    assert fault.startswith("the step after one in which the ")
    fault = fault_of(
        megatron_rank_pool, "planted_more:NeverGathers", "unwatched-steps", "dp2-distopt"
    )
    assert re.search(r"rank \d \(replica \d\) has other bits in .* replica, rank \d \(", fault)


def test_a_rank_that_dies_is_named_with_the_signal(megatron_rank_pool):
    found = fault_of(megatron_rank_pool, "OneRankDies", "whole-step", "dp2")
    assert found == "rank 1 died with signal SIGKILL"


def judged(pool, adapter, check, *layouts, **options):
    """The results of a check, by layout."""
    found = certify(adapter, checks=[check], layouts=layouts, pool=pool, **options)
    return {each.layout: each for each in found if each.check == check}


def test_what_an_adapter_declares_is_not_run_unless_asked_for(megatron_rank_pool):
    adapter = "planted:DeclaresNaN"
    found = judged(megatron_rank_pool, adapter, "nan", "dp2")["dp2"]
    assert (found.verdict, found.fault) == ("declared", "nobody looks at the norm")
    found = judged(megatron_rank_pool, adapter, "nan", "dp2", declared=True)["dp2"]
    assert found.verdict == "declared"
    assert re.fullmatch(
        r"nobody looks at the norm \(a (loss|gradient) .*, in call \d of \d, and the step .*\)",
        found.fault,
    )


def test_what_an_adapter_declares_of_a_word_holds_for_layouts_with_it(megatron_rank_pool):
    found = judged(megatron_rank_pool, "planted:DeclaresNaNOfExperts", "nan", "dp1", "moe")
    assert {name: each.verdict for name, each in found.items()} == {
        "dp1": "failed",
        "moe": "declared",
    }
    with pytest.raises(ValueError, match=r"names \['nan/experts'\], which are none of whole-step"):
        judged(megatron_rank_pool, "planted:DeclaresAnUnknownWord", "nan", "dp1")


def test_a_layout_whose_whole_step_fails_is_judged_no_further(megatron_rank_pool):
    found = judged(megatron_rank_pool, "planted:TwiceTheLoss", "nan", "dp1")
    assert found["dp1"].verdict == "not judged"


@pytest.mark.parametrize(
    ("adapter", "check", "where", "said"),
    [
        (f"{OWN}:FSDPSplitStep", "nan", "dp2", "fsdp2 = True"),
        (f"{OWN}:SplitStep", "nan", "dp2-fsdp2", "fsdp2 = False"),
        ("planted:NoPacks", "nan", "dp2-packs", "no packs = True"),
        ("planted:NoPacks", "nan", "dp2-sequences", "no sequences = True"),
        ("planted:NoPacks", "packed-lengths", "dp1", "no packs"),
        (f"{OWN}:FSDPSplitStep", "low-rank-adapters", "dp2-fsdp2", "no adapters on FSDP2"),
        (f"{OWN}:OrderStable", "same-bits", "packs", "which sequences share a pack is the "),
        (f"{OWN}:SplitStep", "same-bits", "dp1", "no order_stable = True"),
    ],
)
def test_an_adapter_is_judged_on_what_it_offers(megatron_rank_pool, adapter, check, where, said):
    (found,) = judged(megatron_rank_pool, adapter, check, where).values()
    assert found.verdict == "not offered"
    assert found.fault.startswith(said)


#: A check of each kind, where there is the most to go wrong; all of them, and in all layouts, with
#: -m exhaustive.
USUAL = {
    "dp2-distopt": (
        *("whole-step", "split-step", "uneven-replicas", "logprobs-in-mid-step", "abort-and-retry"),
        *("failure-on-one-rank", "nan", "resume", "offload-between-steps"),
    ),
    "tp2-bf16-distopt": ("low-rank-adapters",),
}
#: The other models, each way of sharing them, and all of them together; batches; precisions.
NAMED = (
    *("moe", "dp2-moe", "ep2", "ep2-pp2", "ep2-distopt", "tp2-ep2", "tp2-ep2-etp1", "etp2"),
    *("dp4-ep2", "dp2-tied-pp2", "tied-vpp2", "tp2-tied", "tp2-mtp", "mtp", "mtp-pp2"),
    *("moe-vpp2", "ep2-mtp-tied-pp2", "tp2-ep2-mtp-tied-distopt"),
    *("pp2-packs", "vpp2-packs", "tp2-packs"),
    *("cp2", "cp2-packs", "dp2-cp2", "cp2-pp2", "cp2-tp2-packs"),
    *("cp2-ep2", "cp2-moe-pp2", "dp2-cp2-ep4", "cp2-tp2-ep4-etp1", "cp2-moe-etp2"),
    *("moe-bf16", "ep2-mtp-bf16", "ep2-fp16-distopt", "cp2-moe-bf16", "pp2-mtp-fp16"),
    *("fp16", "dp2-fp16-distopt", "pp2-fp16", "tp2-fp16", "dp2-fp16-packs"),
    *("dp2-fp32", "dp2-bf16", "dp2-bf16-distopt", "pp2-bf16", "tp2-bf16", "tp2-bf16-distopt"),
    "dp2-bf16-packs",
    *("dp2-fsdp2", "dp3-fsdp2", "dp2-fsdp2-sequences"),
    *("dp2-sequences", "pp2-sequences", "dp2-moe-sequences", "ep2-sequences", "mtp-sequences"),
    *("dp2-distopt-sequences", "dp2-packs-sequences", "cp2-sequences", "cp2-packs-sequences"),
    "dp2-bf16-sequences",
    *("dp2-moe-packs", "ep2-packs-sequences", "tp2-ep2-mtp-packs-distopt", "pp2-mtp-packs"),
    *("cp2-mtp", "cp2-mtp-packs-sequences", "cp2-moe-mtp-packs", "vpp2-moe-packs-bf16"),
)


@pytest.mark.parametrize(
    ("name", "checks"),
    [
        *USUAL.items(),
        *(weekly(each, tuple(CHECKS), id=each) for each in dict.fromkeys((*LAYOUTS, *NAMED))),
    ],
)
def test_our_own_step_passes(megatron_rank_pool, name, checks):
    place = layout(name)
    adapter = f"{OWN}:{'FSDPSplitStep' if place.fsdp2 else 'SplitStep'}"
    found = list(certify(adapter, checks=checks, layouts=[name], pool=megatron_rank_pool))
    assert not {each.fault for each in found if each.verdict == "failed"}
    assert all(0 < each.of_bound < 1 for each in found if each.check == "whole-step")
    assert {each.check for each in found if each.verdict == "passed"} == {
        name
        for name, check in CHECKS.items()
        if (name in checks or name == "whole-step")
        and place.lacks(check.where) is None
        and "order_stable" not in check.needs
    }


#: One of each kind that `USUAL` is not; the two other adapters have less to do with a layout: the
#: grid has them, and CI each week.
PROMPT = ("tp2-ep2-etp1", "dp2-bf16-distopt", "fp16", "cp2-packs")
OTHER = tuple(name for name in NAMED if name not in PROMPT and not layout(name).fsdp2)


@pytest.mark.parametrize(
    ("adapter", "name"),
    [
        *(("SplitStep", name) for name in PROMPT),
        *(weekly("SplitStep", name) for name in OTHER),
        *(
            weekly(adapter, name)
            for adapter in ("Megatron", "Window")
            for name in (*PROMPT, *OTHER)
        ),
    ],
)
def test_steps_of_other_layouts_are_those_of_their_definition(megatron_rank_pool, name, adapter):
    found = certify(
        f"{OWN}:{adapter}",
        checks=["counts", "auxiliary-losses", "packed-lengths"],
        layouts=[name],
        pool=megatron_rank_pool,
    )
    assert not {each.fault for each in found if each.verdict == "failed"}


@pytest.mark.parametrize(
    "names",
    [
        ["dp1-moe", "dp2-moe"],
        *(
            weekly([f"dp{n}-{each}" for n in sizes], id=each)
            for each, sizes in {
                "mtp": (1, 2, 4),
                "moe-mtp-tied-distopt": (1, 2, 3, 4),
                "bf16-distopt": (1, 4),
                "tp2-nosp": (1, 2),
                "vpp2-sequences": (1, 2),
                "cp2-moe": (1, 2),
            }.items()
        ),
    ],
)
def test_a_step_that_is_order_stable_has_the_same_bits_on_all_replicas(megatron_rank_pool, names):
    found = judged(megatron_rank_pool, f"{OWN}:OrderStable", "same-bits", *names).values()
    assert {each.verdict for each in found} == {"passed"}, found
    assert len({each.bits for each in found}) == 1


def test_bits_of_other_numbers_of_replicas_are_compared(megatron_rank_pool):
    found = judged(megatron_rank_pool, "planted:ScalesWithReplicas", "same-bits", "dp1", "dp2")
    assert found["dp2"].fault == "the same microbatches give other bits than in dp1"
