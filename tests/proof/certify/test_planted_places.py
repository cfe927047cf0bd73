"""Checks catch bugs that show in some sizes, places and times alone, whatever the seed."""

from __future__ import annotations

import random

import pytest

from megatron_idempotent.proof.certify import CHECKS, layout, run
from megatron_idempotent.proof.certify.draws import CALLS, MICROBATCHES, Draw

#: The bug, the check that catches it, where, and what is said of it.
BUGS = [
    ("MeanOfCalls", "drawn-sizes", "dp2", "the gradient is "),
    ("OddOneDropped", "drawn-sizes", "dp2", "the gradient is "),
    ("OneCountsTwice", "drawn-sizes", "dp2", "the gradient is "),
    ("FourthCallLost", "drawn-sizes", "dp2", "the gradient is "),
    ("MicrobatchOverZero", "nothing-valid", "dp2", "is nan"),
    ("SwallowsLaterErrors", "failure-on-one-rank", "dp2", "and rank 0 finished the step"),
    ("OnlyTheLastRank", "failure-on-one-rank", "dp2", "failed on rank 0"),
    ("FirstNaNAlone", "nan", "dp2", "of replica 1 is NaN, in call "),
    ("EvalLeftOn", "logprobs-in-mid-step", "dp2", "the step trains in eval mode: decoder was"),
    ("ExportsBeforeTheGather", "export-in-mid-step", "dp2-distopt", "export() gives other weig"),
    ("ExportsZeros", "export-in-mid-step", "dp2", "export() gives other weights than"),
    ("ExportsTheFirst", "export-in-mid-step", "dp2", "export() gives other weights than"),
    ("Bfloat16Sums", "whole-step", "dp2", "the gradient is off by 0."),
    ("Clips", "whole-step", "dp2", "is set to clip gradients (clip_grad is 0.1): certify judges"),
    ("ClipsItself", "whole-step", "dp2", "0.125 times the right one, and the norm that finish()"),
]


@pytest.fixture(autouse=True)
def importable(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))


@pytest.mark.parametrize(("bug", "check", "where", "said"), BUGS)
def test_a_bug_of_some_places_is_found(megatron_rank_pool, bug, check, where, said):
    fault, _ = run.outcome_of(
        megatron_rank_pool,
        f"planted_places:{bug}",
        CHECKS[check],
        layout(where),
        seed=random.randrange(10**6),
    )
    assert said in fault, fault


def test_a_loss_that_weighs_no_losses_of_layers_is_not_asked(megatron_rank_pool):
    whole, name = CHECKS["split-step"], "planted_places:WeightRaises"
    fault, _ = run.outcome_of(megatron_rank_pool, name, whole, layout("pp2"))
    assert not fault


@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_a_long_step_has_the_most_calls_and_a_call_of_the_most_microbatches(multiple):
    for seed in range(50):
        sizes = Draw(seed, "dp2", "drawn-sizes").sizes(CALLS, multiple)
        assert len(sizes) == CALLS
        assert (max(sizes), min(sizes)) == (MICROBATCHES // multiple * multiple, multiple)
        assert not any(size % multiple for size in sizes)
    assert Draw(3, "a").sizes(CALLS) == Draw(3, "a").sizes(CALLS)
    assert any(Draw(3, "a").sizes(CALLS) != Draw(n, "a").sizes(CALLS) for n in range(5))
