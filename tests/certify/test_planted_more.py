"""Bugs of sizes, places and time are caught where they are wrong; right adapters stay green."""

from __future__ import annotations

import random

import planted_proof
import pytest

from megatron_idempotent.certify import certify, layout

#: The layout on which each bug is wrong, and steps that show it without `certify`.
BUGS = {
    "MeanOfCalls": ("dp1", "1 3"),
    "RowsWeighCalls": ("dp1", "2 2h"),
    "OddMicrobatchDropped": ("dp1", "3"),
    "LoneCallLost": ("dp1", "1 1"),
    "SingleCountedTwice": ("dp2", "1 2"),
    "SixMicrobatches": ("dp1", "7"),
    "EightOfACall": ("dp1", "9"),
    "FourthCallLost": ("dp1", "1 1 1 1"),
    "NothingValidIsNaN": ("dp1", "2m"),
    "NothingValidInAStep": ("dp1", "1; 1M; 1"),
    "EmptyCallEnds": ("dp1", "1 0 1"),
    "EmptyCallZeroes": ("dp1", "1 0 1"),
    "EmptyCallForgetsTokens": ("dp1", "1 0"),
    "PadsByRepeating": ("dp1", "3h"),
    "CutsToTheLeast": ("dp2", "1/2"),
    "TokensOfRankZero": ("dp2", "1/2"),
    "WeightsOutOfStep": ("dp1", "2f"),
    "StopsAtMasked": ("dp1", "2f"),
    "MaskedBeginsAgain": ("dp1", "1 1M 1"),
    "CountsInBF16": ("dp1", "9"),
    "CountsTheFirstToken": ("dp1", "2p 2"),
    "RankWithoutTokensStays": ("dp2", "1M/1"),
    "MaskOfTheFirstStep": ("dp1", "1h; 1"),
    "SkipsMasked": ("moe", "2f"),
    "RepeatsToFillStages": ("pp2", "1 2"),
    "LengthsSortedAlone": ("packs", "4l"),
    "LossOfCalls": ("dp1", "1 0"),
    "SwallowsLaterCalls": ("dp1", "1 1x; 1"),
    "SwallowsBackward": ("dp1", "1b; 1"),
    "SwallowsLaterLosses": ("pp2", "2 2x; 2"),
    "LastMicrobatchDecides": ("dp1", "1x 1; 1"),
    "OnlyLastRankIsHeard": ("dp2", "1x/1; 1"),
    "NaNOfRankZero": ("dp2", "1/1n; 1"),
    "NaNOfTheFirst": ("dp1", "2n; 1"),
    "NaNUnlessInTheLastCall": ("dp1", "1 1n; 1"),
    "NaNClearsMoments": ("dp1", "1; 1n; 1"),
    "DropsItsOwnNaN": ("dp2", "1/1n; 1"),
    "DrainsCollectives": ("dp2", "1/1x; 1"),
    "SecondErrorIsQuiet": ("dp1", "1x; 1x; 1"),
    "KeepsFailedWindow": ("dp1", "1 1x; 1"),
    "ZeroesWhereItFailed": ("dp2", "1/1x; 1"),
    "UndoesTheLastCall": ("dp1", "1 1 abort; 1"),
    "AbortKeepsQueue": ("dp1", "1 1 abort; 1"),
    "FrozenByFailure": ("dp1", "1x; 1"),
    "NeverGathers": ("dp2-distopt", "1; 1; 1"),
    "GathersLate": ("dp2-distopt", "1; 1; 1"),
    "LogprobsOfStale": ("dp2-distopt", "1; logprobs"),
    "HooksLeftOff": ("dp2-distopt", "logprobs; 1; 1; 1"),
    "ExportsStale": ("dp2-distopt", "1; export"),
    "ExportsZeros": ("dp1", "export"),
    "ExportsAPart": ("dp1", "export"),
    "ExportsTheFirst": ("dp1", "export; 1; export"),
    "ExportsTheLast": ("dp1", "export; 1; export"),
    "EvalLeftOn": ("dp1", "logprobs"),
    "EvalLeftByAbort": ("dp1", "abort"),
    "LogprobsOfTheStep": ("dp1", "1 logprobs logprobs"),
    "ScaleFuncLost": ("fp16", "logprobs; 1"),
    "FifthStepForgets": ("dp1", "1; 1; 1; 1; 1; 1"),
    "CleanAfterEmpty": ("dp1", "1 0; 1"),
    "HooksStayAfterAbort": ("dp1", "abort; 1"),
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
    place, _ = BUGS[bug]
    found = certify(f"planted_more:{bug}", layouts=[place], pool=megatron_rank_pool)
    assert any(each.verdict == "failed" for each in found)  # the first is enough


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "place"), RIGHT)
def test_a_right_adapter_in_an_unusual_style_passes(megatron_rank_pool, name, place):
    found = certify(f"planted_more:{name}", layouts=[place], pool=megatron_rank_pool)
    assert not {each.check: each.fault for each in found if each.verdict == "failed"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_wrong_without_certify(megatron_rank_pool, bug):
    place, script = BUGS[bug]
    right, found = (
        megatron_rank_pool.run(
            layout(place).ranks, planted_proof.played, bug, place, script, instead=instead
        )
        for instead in (True, False)
    )
    assert any(map(planted_proof.difference, found, right))
