"""Bugs of sizes, places and time are caught where they are wrong; right adapters stay green."""

from __future__ import annotations

import random

import planted_proof
import pytest

from megatron_idempotent.proof.certify import certify, layout

#: The check that catches each bug, the least layout on which it is wrong, and steps that show it
#: without `certify`, in the words of `planted_proof.py`.
BUGS = {
    "MeanOfCalls": ("drawn-sizes", "dp1", "1 3"),
    "RowsWeighCalls": ("drawn-sizes", "dp1", "2 2h"),
    "OddMicrobatchDropped": ("drawn-sizes", "dp1", "3"),
    "LoneCallLost": ("nothing-valid", "dp1", "1 1"),
    "SingleCountedTwice": ("drawn-sizes", "dp2", "1 2"),
    "SixMicrobatches": ("drawn-sizes", "dp1", "7"),
    "EightOfACall": ("drawn-sizes", "dp1", "9"),
    "FourthCallLost": ("drawn-sizes", "dp1", "1 1 1 1"),
    "NothingValidIsNaN": ("nothing-valid", "dp1", "2m"),
    "NothingValidInAStep": ("nothing-valid", "dp1", "1; 1M; 1"),
    "EmptyCallEnds": ("drawn-sizes", "dp1", "1 0 1"),
    "EmptyCallZeroes": ("drawn-sizes", "dp1", "1 0 1"),
    "EmptyCallForgetsTokens": ("drawn-sizes", "dp1", "1 0"),
    "PadsByRepeating": ("drawn-sizes", "dp1", "3h"),
    "CutsToTheLeast": ("drawn-sizes", "dp2", "1/2"),
    "TokensOfRankZero": ("drawn-sizes", "dp2", "1/2"),
    "WeightsOutOfStep": ("nothing-valid", "dp1", "2f"),
    "StopsAtMasked": ("nothing-valid", "dp1", "2f"),
    "MaskedBeginsAgain": ("nothing-valid", "dp1", "1 1M 1"),
    "CountsInBF16": ("drawn-sizes", "dp1", "9"),
    "CountsTheFirstToken": ("drawn-sizes", "dp1", "2p 2"),
    "RankWithoutTokensStays": ("nothing-valid", "dp2", "1M/1"),
    "MaskOfTheFirstStep": ("nothing-valid", "dp1", "1h; 1"),
    "SkipsMasked": ("nothing-valid", "moe", "2f"),
    "RepeatsToFillStages": ("drawn-sizes", "pp2", "1 2"),
    "LengthsSortedAlone": ("packed-lengths", "packs", "4l"),
    "LossOfCalls": ("drawn-sizes", "dp1", "1 0"),
    "SwallowsLaterCalls": ("failure-on-one-rank", "dp1", "1 1x; 1"),
    "SwallowsBackward": ("failure-on-one-rank", "dp1", "1b; 1"),
    "SwallowsLaterLosses": ("failure-on-one-rank", "pp2", "2 2x; 2"),
    "LastMicrobatchDecides": ("failure-on-one-rank", "dp1", "1x 1; 1"),
    "OnlyLastRankIsHeard": ("failure-on-one-rank", "dp2", "1x/1; 1"),
    "NaNOfRankZero": ("nan", "dp2", "1/1n; 1"),
    "NaNOfTheFirst": ("nan", "dp1", "2n; 1"),
    "NaNUnlessInTheLastCall": ("nan", "dp1", "1 1n; 1"),
    "NaNClearsMoments": ("nan", "dp1", "1; 1n; 1"),
    "DropsItsOwnNaN": ("nan", "dp2", "1/1n; 1"),
    "DrainsCollectives": ("failure-on-one-rank", "dp2", "1/1x; 1"),
    "SecondErrorIsQuiet": ("failure-on-one-rank", "dp1", "1x; 1x; 1"),
    "KeepsFailedWindow": ("failure-on-one-rank", "dp1", "1 1x; 1"),
    "ZeroesWhereItFailed": ("failure-on-one-rank", "dp2", "1/1x; 1"),
    "UndoesTheLastCall": ("failure-on-one-rank", "dp1", "1 1 abort; 1"),
    "AbortKeepsQueue": ("abort-and-retry", "dp1", "1 1 abort; 1"),
    "FrozenByFailure": ("failure-on-one-rank", "dp1", "1x; 1"),
    "NeverGathers": ("unwatched-steps", "dp2-distopt", "1; 1; 1"),
    "GathersLate": ("unwatched-steps", "dp2-distopt", "1; 1; 1"),
    "LogprobsOfStale": ("logprobs-in-mid-step", "dp2-distopt", "1; logprobs"),
    "HooksLeftOff": ("logprobs-in-mid-step", "dp2-distopt", "logprobs; 1; 1; 1"),
    "ExportsStale": ("export-in-mid-step", "dp2-distopt", "1; export"),
    "ExportsZeros": ("export-in-mid-step", "dp1", "export"),
    "ExportsAPart": ("export-in-mid-step", "dp1", "export"),
    "ExportsTheFirst": ("export-in-mid-step", "dp1", "export; 1; export"),
    "ExportsTheLast": ("export-in-mid-step", "dp1", "export; 1; export"),
    "EvalLeftOn": ("logprobs-in-mid-step", "dp1", "logprobs"),
    "EvalLeftByAbort": ("abort-and-retry", "dp1", "abort"),
    "LogprobsOfTheStep": ("logprobs-in-mid-step", "dp1", "1 logprobs logprobs"),
    "ScaleFuncLost": ("logprobs-in-mid-step", "fp16", "logprobs; 1"),
    "FifthStepForgets": ("second-run", "dp1", "1; 1; 1; 1; 1; 1"),
    "CleanAfterEmpty": ("drawn-sizes", "dp1", "1 0; 1"),
    "HooksStayAfterAbort": ("abort-and-retry", "dp1", "abort; 1"),
}
RIGHT = [
    *(("Loop", each) for each in ("dp1", "dp2", "dp2-distopt")),
    *((name, "dp2") for name in ("KnownTotals", "ReplaysAfterFailure", "SortsByLength")),
    *((name, each) for name in ("OneCallEach", "AllInOneCall") for each in ("dp2", "pp2")),
    *(("AbortRebuilds", each) for each in ("dp2", "dp2-distopt")),
    ("SumsOutside", "dp2-distopt"),
]
#: As many as a few seconds hold; the others with -m exhaustive.
SAMPLE = random.Random(40).sample(sorted(BUGS), 3)


def mostly_exhaustive(names):
    return [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.exhaustive) for n in names]


@pytest.fixture(autouse=True)
def importable(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))


@pytest.mark.parametrize("bug", mostly_exhaustive(BUGS))
def test_a_bug_is_caught_where_it_is_wrong(megatron_rank_pool, bug):
    check, place, _ = BUGS[bug]
    adapter = f"planted_more:{bug}"
    found = certify(adapter, checks=[check], layouts=[place], pool=megatron_rank_pool)
    assert {each.check for each in found if each.verdict == "failed"} == {check}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "place"), RIGHT)
def test_a_right_adapter_in_an_unusual_style_passes(megatron_rank_pool, name, place):
    found = certify(f"planted_more:{name}", layouts=[place], pool=megatron_rank_pool)
    assert not {each.check: each.fault for each in found if each.verdict == "failed"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_wrong_without_certify(megatron_rank_pool, bug):
    _, place, script = BUGS[bug]
    right, found = (
        megatron_rank_pool.run(
            layout(place).ranks, planted_proof.played, bug, place, script, instead=instead
        )
        for instead in (True, False)
    )
    assert any(map(planted_proof.difference, found, right))
