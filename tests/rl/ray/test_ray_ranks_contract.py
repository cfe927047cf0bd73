"""Ranks in Ray actors keep the contract of all kinds of ranks."""

from __future__ import annotations

import pytest
from contract_ranks import FactoryContract, RankContract

from megatron_idempotent.rl.workers.ray import RayRanks


@pytest.fixture(scope="module")
def make_ranks(cluster):
    """Make ranks on this machine's cluster."""
    return lambda spec, size: RayRanks(spec, size)


class TestRayRanks(RankContract):
    pass


class TestRayFactory(FactoryContract):
    pass
