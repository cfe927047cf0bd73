"""Layouts of packs and of context parallelism show what an adapter can get wrong in them."""

from __future__ import annotations

import pytest

from megatron_idempotent.patching.decide import installed
from megatron_idempotent.proof.certify import CHECKS, certify, layout, run

VERSION = found.release if (found := installed("megatron-core")) else ()


@pytest.fixture(autouse=True)
def importable(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        ("SeesTheWholePack", "whole-step"),
        ("PositionsGoOn", "whole-step"),
        ("PredictsTheNextSequence", "whole-step"),
        ("CountsPadding", "whole-step"),
        ("MeanOfPacks", "packed-lengths"),
    ],
)
def test_a_pack_that_is_made_wrongly_is_found(megatron_rank_pool, bug, check):
    where = layout("dp2-packs")
    fault, _ = run.outcome_of(megatron_rank_pool, f"planted_batches:{bug}", CHECKS[check], where)
    assert fault.startswith("the gradient is "), fault


def test_a_sequence_that_is_in_no_pack_is_found(megatron_rank_pool):
    where, adapter = layout("moe-packs"), "planted_batches:LosesASequence"
    fault, _ = run.outcome_of(megatron_rank_pool, adapter, CHECKS["whole-step"], where)
    assert "lack 1 of the step's sequences" in fault, fault


@pytest.mark.parametrize("adapter", ["OneSequenceEach", "TellsOfPadding"])
def test_losses_of_packs_are_those_of_the_packs_that_are_trained_on(megatron_rank_pool, adapter):
    if adapter == "TellsOfPadding" and VERSION < (0, 16):
        pytest.skip("before 0.16 models are not told of padding")
    where, name = layout("moe-packs"), f"planted_batches:{adapter}"
    for check in ("packed-lengths", "abort-and-retry"):
        fault, of_bound = run.outcome_of(megatron_rank_pool, name, CHECKS[check], where)
        assert not fault
        assert of_bound < 1


@pytest.mark.parametrize("bug", ["CutsInHalves", "CountsOnEachRank"])
def test_a_row_that_is_shared_wrongly_is_found(megatron_rank_pool, bug):
    whole = CHECKS["whole-step"]
    fault, _ = run.outcome_of(megatron_rank_pool, f"planted_batches:{bug}", whole, layout("cp2"))
    said = {"CutsInHalves": "off by ", "CountsOnEachRank": "0.5 times the right one"}[bug]
    assert fault.startswith(f"the gradient is {said}"), fault


def test_a_bug_on_fsdp2_is_found_by_the_same_checks(megatron_rank_pool):
    where, adapter = layout("dp2-fsdp2"), "planted_batches:ReducesTheLastCallAlone"
    fault, _ = run.outcome_of(megatron_rank_pool, adapter, CHECKS["split-step"], where)
    assert fault.startswith("the gradient is off by "), fault
    fault, _ = run.outcome_of(megatron_rank_pool, adapter, CHECKS["whole-step"], where)
    assert not fault


@pytest.mark.parametrize(
    ("adapter", "where"),
    [("FSDPSplitStep", "dp2"), ("SplitStep", "dp2-fsdp2"), ("Megatron", "dp2-fsdp2")],
)
def test_an_adapter_is_judged_on_the_models_that_it_trains(megatron_rank_pool, adapter, where):
    name = f"megatron_idempotent.proof.certify.adapters:{adapter}"
    found = list(certify(name, checks=["nan"], layouts=[where], pool=megatron_rank_pool))
    assert {each.verdict for each in found} == {"not offered"}


def test_an_adapter_without_packs_is_not_judged_on_them(megatron_rank_pool):
    results = certify("planted:NoPacks", layouts=["dp2-packs"], pool=megatron_rank_pool)
    assert {(each.verdict, each.fault) for each in results} == {("not offered", "no packs = True")}


def test_packs_are_checked_where_there_are_some(megatron_rank_pool):
    *_, found = certify(
        "planted:NoPacks", checks=["packed-lengths"], layouts=["dp2"], pool=megatron_rank_pool
    )
    assert (found.verdict, found.fault) == ("not offered", "no packs")
