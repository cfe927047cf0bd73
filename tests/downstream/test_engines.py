"""Frameworks' own steps on two ranks: log-probs or evaluations between them, and failures.

`VERL_SOURCE`, `MS_SWIFT_SOURCE`, `AREAL_SOURCE`, `ROLL_SOURCE`, `NEMO_RL_SOURCE` and `SKYRL_SOURCE`
name checkouts, or unpacked wheels. Data and losses are replaced by small ones; modes, window, step
and evaluation are theirs.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.full

CLASSES = {
    "verl": "verl_engine:Verl",
    "ms_swift": "swift_engine:Swift",
    "areal": "areal_engine:Areal",
    "roll": "megatron_idempotent.patches.frameworks._roll:Roll",
    "nemo_rl": "megatron_idempotent.patches.frameworks._nemo_rl:NemoRL",
    "skyrl": "megatron_idempotent.patches.frameworks._skyrl:SkyRL",
}
#: Called for log-probs, or for evaluations, between steps.
INFERRING = ("verl", "ms_swift", "areal", "nemo_rl", "skyrl")
Outcome = tuple[list[float], bytes]


def source(name: str) -> str:
    return os.environ.get(f"{name.upper()}_SOURCE", "")


def given(name: str) -> Any:
    """The framework as a parameter of a test, skipped where there is no checkout of it."""
    reason = f"{name.upper()}_SOURCE names no checkout of {name}"
    return pytest.param(name, marks=pytest.mark.skipif(not source(name), reason=reason), id=name)


def start(name: str, *, applied: bool = True, overlap: bool = True, **how: object) -> Any:
    """Runs on a rank: the framework's engine around a small model."""
    import megatron_idempotent

    sys.path.insert(0, source(name))
    if applied:
        megatron_idempotent.apply()
    module, _, kind = CLASSES[name].partition(":")
    engine = getattr(importlib.import_module(module), kind)
    if name == "roll":
        how["overlap_grad_reduce"] = overlap
    return engine(overlap_param_gather=overlap, **how)


def windows(
    name: str, fail: tuple[str, int] | None = None, *, inferring: bool = False, **how: bool
) -> Outcome:
    """Runs on a rank: steps; after the first, one that raises, or log-probs, one of which raise."""
    engine = start(name, **how)
    for step in range(3):
        if step == 1 and fail is not None:
            engine.failing(fail, lambda: engine.train(77))
        if step == 1 and inferring:
            engine.logprobs(5)
            engine.failing(("loss", 1), lambda: engine.logprobs(5))
            del engine.losses[4:]
        engine.train(step)
    return engine.outcome()


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("site", ["data", "loss", "backward"])
@pytest.mark.parametrize("name", [given(each) for each in CLASSES])
def test_a_step_that_raised_leaves_no_trace_in_later_steps(name, site, index, megatron_ranks):
    assert megatron_ranks(2, windows, name, (site, index)) == megatron_ranks(2, windows, name)


@pytest.mark.parametrize("name", [given(each) for each in INFERRING])
def test_logprobs_or_evaluations_between_steps_change_nothing(name, megatron_ranks):
    found = megatron_ranks(2, windows, name, inferring=True)
    assert found == megatron_ranks(2, windows, name)


@pytest.mark.parametrize("name", [given(each) for each in CLASSES])
def test_steps_that_do_not_fail_have_the_bits_of_stock(name, megatron_ranks):
    patched = megatron_ranks(2, windows, name)
    assert patched == megatron_ranks(2, windows, name, applied=False)


@pytest.mark.parametrize("name", [given("roll")])
def test_roll_without_overlap_is_right_after_a_failure_and_stock_silently_another(
    name, megatron_ranks
):
    whole, stock = (
        megatron_ranks(2, windows, name, overlap=False, applied=applied)
        for applied in (True, False)
    )
    assert whole == stock
    assert megatron_ranks(2, windows, name, ("loss", 3), overlap=False) == whole
    failed = megatron_ranks(2, windows, name, ("loss", 3), overlap=False, applied=False)
    assert failed != stock


def norms(scale: float, applied: bool) -> tuple[list[float], Outcome]:
    """Runs on a rank: the gradient norms of some fp16 steps of AReaL's, and their outcome."""
    areal = start("areal", applied=applied, dtype="fp16", loss_scale=scale)
    return [areal.train(step) for step in range(3)], areal.outcome()


@pytest.mark.parametrize("name", [given("areal")])
def test_fp16_steps_have_the_bits_of_stock_which_scales_its_losses_itself(name, megatron_ranks):
    stock = megatron_ranks(2, norms, 1024.0, False)
    assert megatron_ranks(2, norms, 1024.0, True) == stock
    assert all(norm == norm for norm in stock[0][0]), "finite"
