"""Each check catches a bug that was planted for it; `SplitStep` itself passes all of them."""

from __future__ import annotations

import re

import pytest

from megatron_idempotent.proof.certify import CHECKS, LAYOUTS, certify, layout, run

OWN = "megatron_idempotent.proof.certify.adapters:SplitStep"
#: The bug, the check that it was planted for, what is said of it, and the checks that fail too.
BUGS = [
    ("TwiceTheLoss", "whole-step", "the gradient is 2 times the right one", set()),
    ("MeanOfMeans", "counts", "the gradient is off by ", set()),
    ("EvenSequences", "packed-lengths", "the gradient is off by ", set()),
    ("KeepsTheLastCall", "split-step", "the gradient is off by ", {"swapped-adapters"}),
    (
        "FirstStepsDivisor",
        "sizes-change",
        "the gradient is 0.5 times the right one",
        {"uneven-replicas", "replica-without-rows"},
    ),
    (
        "MeanOfReplicas",
        "uneven-replicas",
        "the gradient is off by ",
        {"replica-without-rows"},
    ),
    ("RefusesNoRows", "replica-without-rows", "IndexError in ", set()),
    ("SixAtMost", "drawn-sizes", "the gradient is off by ", set()),
    ("StepOverZero", "nothing-valid", "the gradient is NaN", set()),
    ("NeverGathers", "unwatched-steps", " than its replica", set()),
    ("CallsCountAlike", "auxiliary-losses", "the gradient is off by ", set()),
    ("LogprobsZeroGradients", "logprobs-in-mid-step", "the step has moved no parameter", set()),
    ("ExportRounds", "export-in-mid-step", "a step that has not finished has changed", set()),
    ("AbortUpdates", "abort-and-retry", "abort() has changed", {"swapped-adapters"}),
    ("SwallowsErrors", "failure-on-one-rank", "rank 0 finished the step", set()),
    ("UpdatesWithNaN", "nan", "the step updated all the same", set()),
    ("WarmsUpTwice", "second-run", "the gradient is off by ", set()),
    ("ForgetsMoments", "resume", "the gradient is off by ", set()),
    ("LosesMomentsOnTheHost", "offload-between-steps", "the gradient is off by ", set()),
    ("BringsNothingBackForLogprobs", "logprobs-while-offloaded", "after onload(training=", set()),
    ("DropsGradientsOffloaded", "offload-in-mid-step", "the step has moved no parameter", set()),
    ("FinishZeroesAll", "swapped-adapters", "the gradient is off by ", set()),
    ("PromisesBits", "same-bits", "in another order and two calls give other bits", set()),
]


#: Steps of many sizes, which many bugs show in.
DRAWN = {"drawn-sizes", "nothing-valid", "unwatched-steps"}
#: The patches gather what is pending in a window.
ON_STOCK = {"unwatched-steps"}


def place_of(check):
    """The layout in which a bug was planted for a check."""
    if CHECKS[check].auxiliary:
        return "dp2-moe"
    if check in ON_STOCK:
        return "dp2-distopt"
    return "dp2-packs" if CHECKS[check].packs else "dp2"


@pytest.fixture(autouse=True)
def importable(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))


def test_every_check_has_a_bug_that_it_catches():
    assert [check for _, check, _, _ in BUGS] == [*CHECKS]


@pytest.mark.parametrize(("bug", "check", "said", "also"), BUGS)
def test_a_check_catches_its_bug(megatron_rank_pool, bug, check, said, also):
    where, stock = layout(place_of(check)), check in ON_STOCK
    adapter = f"planted:{bug}"
    fault, _ = run.outcome_of(megatron_rank_pool, adapter, CHECKS[check], where, stock=stock)
    assert said in fault


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        # The other rank only learns that this one has left, and that says less.
        ("OneRankReportsAnotherNorm", "finish() reports the gradient norm "),
        ("ReportsAnotherLoss", "finish() reports the loss "),
    ],
)
def test_what_a_step_reports_is_held_to_its_definition(megatron_rank_pool, bug, said):
    whole = CHECKS["whole-step"]
    fault, _ = run.outcome_of(megatron_rank_pool, f"planted:{bug}", whole, LAYOUTS["dp2"])
    assert fault.startswith(said)


def test_a_rank_that_raises_is_named_where_the_others_wait(megatron_rank_pool, monkeypatch):
    monkeypatch.setattr(run, "DEADLINE_S", 5.0)
    whole = CHECKS["whole-step"]
    fault, _ = run.outcome_of(megatron_rank_pool, "planted:OneRankRaises", whole, LAYOUTS["dp2"])
    assert re.fullmatch(
        r"rank 1 did not end within 5 s; on rank 0: RuntimeError in .*: the first rank .* begin",
        fault,
    )


def nan_of(adapter, pool, **options):
    *_, found = certify(adapter, checks=["nan"], layouts=["dp2"], pool=pool, **options)
    return found


def test_what_an_adapter_declares_is_not_run_unless_asked_for(megatron_rank_pool):
    found = nan_of("planted:DeclaresNaN", megatron_rank_pool)
    assert (found.verdict, found.fault) == ("declared", "nobody looks at the norm")
    found = nan_of("planted:DeclaresNaN", megatron_rank_pool, declared=True)
    assert found.verdict == "declared"
    assert re.fullmatch(
        r"nobody looks at the norm \(a loss of replica \d is NaN, in call \d of \d, and the .*\)",
        found.fault,
    )


def test_what_an_adapter_declares_of_a_word_holds_for_layouts_with_it(megatron_rank_pool):
    adapter = "planted:DeclaresNaNOfExperts"
    found = {
        each.layout: each.verdict
        for each in certify(
            adapter, checks=["nan"], layouts=["dp2", "moe"], pool=megatron_rank_pool
        )
        if each.check == "nan"
    }
    assert found == {"dp2": "failed", "moe": "declared"}
    with pytest.raises(ValueError, match=r"names \['nan/experts'\], which are none of whole-step"):
        nan_of("planted:DeclaresAnUnknownWord", megatron_rank_pool)


def test_a_layout_whose_whole_step_fails_is_judged_no_further(megatron_rank_pool):
    assert nan_of("planted:TwiceTheLoss", megatron_rank_pool).verdict == "not judged"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("bug", "check", "said", "also"), BUGS)
def test_no_other_check_catches_it(megatron_rank_pool, bug, check, said, also):
    found = certify(
        f"planted:{bug}",
        layouts=[place_of(check)],
        stock=check in ON_STOCK,
        pool=megatron_rank_pool,
    )
    others = DRAWN - {check}
    assert {each.check for each in found if each.verdict == "failed"} - others == {check} | also


#: Where there is the most to go wrong; the others with -m exhaustive.
USUAL = ("dp2-distopt",)
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
    *("dp2-fp32", "dp2-bf16", "dp2-bf16-distopt", "pp2-bf16", "tp2-bf16", "dp2-bf16-packs"),
    *("dp2-fsdp2", "dp3-fsdp2", "dp2-fsdp2-sequences"),
    *("dp2-sequences", "pp2-sequences", "dp2-moe-sequences", "ep2-sequences", "mtp-sequences"),
    *("dp2-distopt-sequences", "dp2-packs-sequences", "cp2-sequences", "cp2-packs-sequences"),
    "dp2-bf16-sequences",
    *("dp2-moe-packs", "ep2-packs-sequences", "tp2-ep2-mtp-packs-distopt", "pp2-mtp-packs"),
    *("cp2-mtp", "cp2-mtp-packs-sequences", "cp2-moe-mtp-packs", "vpp2-moe-packs-bf16"),
)


@pytest.mark.parametrize(
    "name",
    [
        each if each in USUAL else pytest.param(each, marks=pytest.mark.exhaustive)
        for each in dict.fromkeys((*LAYOUTS, *NAMED))
    ],
)
def test_our_own_step_passes(megatron_rank_pool, name):
    adapter = OWN.replace("SplitStep", "FSDPSplitStep") if layout(name).fsdp2 else OWN
    found = list(certify(adapter, layouts=[name], pool=megatron_rank_pool))
    made = {each.check for each in found if each.verdict == "passed"}
    faults = {each.fault for each in found if each.verdict == "failed"}
    assert not faults
    assert all(0 < each.of_bound < 1 for each in found if each.check == "whole-step")
    place = layout(name)
    assert made == {
        name
        for name, check in CHECKS.items()
        if (place.replicas > 1 or not check.replicas)
        and (place.auxiliary or not check.auxiliary)
        and (place.packs or not check.packs)
        and (place.adapters or not check.adapters)
        and not check.bits
    }


STABLE = "megatron_idempotent.proof.certify.adapters:OrderStable"


@pytest.mark.parametrize(
    "names",
    [
        ["dp1-moe", "dp2-moe"],
        *(
            pytest.param([f"dp{n}-{each}" for n in sizes], marks=pytest.mark.exhaustive, id=each)
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
    found = list(certify(STABLE, checks=["same-bits"], layouts=names, pool=megatron_rank_pool))
    assert {each.verdict for each in found} == {"passed"}, found
    assert len({each.bits for each in found if each.bits}) == 1


def test_bits_of_other_numbers_of_replicas_are_compared(megatron_rank_pool):
    *_, found = certify(
        "planted:ScalesWithReplicas",
        checks=["same-bits"],
        layouts=["dp1", "dp2", "dp2-packs"],
        pool=megatron_rank_pool,
    )
    assert (found.verdict, found.layout) == ("not offered", "dp2-packs")
    *_, found = certify(
        "planted:ScalesWithReplicas",
        checks=["same-bits"],
        layouts=["dp1", "dp2"],
        pool=megatron_rank_pool,
    )
    assert found.fault == "the same microbatches give other bits than in dp1"


#: One of each kind that those of `test_our_own_step_passes` are not.
PROMPT = ("tp2-ep2-etp1", "dp2-bf16-distopt", "fp16", "cp2-moe-mtp-packs")
OTHERS = tuple(name for name in NAMED if name not in PROMPT and not layout(name).fsdp2)


@pytest.mark.parametrize(
    ("adapter", "name"),
    [
        pytest.param(
            adapter,
            name,
            # The two others have less to do with a layout: the grid has them, and CI each week.
            marks=()
            if (adapter, name in PROMPT) == ("SplitStep", True)
            else pytest.mark.exhaustive,
        )
        for adapter in ("SplitStep", "Megatron", "Window")
        for name in (*PROMPT, *OTHERS)
    ],
)
def test_steps_of_other_layouts_are_those_of_their_definition(megatron_rank_pool, name, adapter):
    found = certify(
        f"megatron_idempotent.proof.certify.adapters:{adapter}",
        checks=["counts", "auxiliary-losses", "packed-lengths"],
        layouts=[name],
        pool=megatron_rank_pool,
    )
    assert not {each.fault for each in found if each.verdict == "failed"}
