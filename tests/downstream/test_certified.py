"""Holds what `certify` finds in frameworks of August 2026, whose sources a variable gives.

`NEMO_RL_SOURCE`, `NEMO_RL_3659_SOURCE` (the commit before #3660 was merged), `VERL_SOURCE`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_idempotent.certify import certify

#: Nobody tells the other ranks of a failure, and nobody looks at the loss or the norm.
THEIRS = {"failure-on-one-rank", "nan"}


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def failed(adapter, variable, monkeypatch, pool, **options):
    source = os.environ.get(variable)
    if not source:
        pytest.skip(f"{variable} names no checkout")
    monkeypatch.setenv(variable.replace("_3659", ""), source)
    if variable == "VERL_SOURCE":  # or apply() would not find it before it is imported
        monkeypatch.syspath_prepend(source)
    found = certify(f"certified:{adapter}", pool=pool, **options)
    return {each.check: each.fault for each in found if each.verdict == "failed"}


@pytest.mark.parametrize(
    ("adapter", "variable", "expected"),
    [
        ("NemoRL", "NEMO_RL_SOURCE", THEIRS),
        ("NemoRLOnTrainStep", "NEMO_RL_SOURCE", set()),
        ("Verl", "VERL_SOURCE", THEIRS),
        ("VerlOnTrainStep", "VERL_SOURCE", set()),
    ],
)
def test_two_replicas(adapter, variable, expected, monkeypatch, megatron_rank_pool):
    found = failed(adapter, variable, monkeypatch, megatron_rank_pool, layouts=["dp2"])
    assert found.keys() == expected, found


@pytest.mark.parametrize(
    ("stock", "said"),
    [(True, "the gradient is "), (False, "gradients were added to gradients")],
)
def test_nemo_rl_before_3660(stock, said, monkeypatch, megatron_rank_pool):
    found = failed(
        "NemoRL",
        "NEMO_RL_3659_SOURCE",
        monkeypatch,
        megatron_rank_pool,
        layouts=["dp2"],
        checks=["whole-step"],
        stock=stock,
    )
    assert said in found["whole-step"]
