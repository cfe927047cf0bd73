"""`TrainStep` keeps the contract of all steps in three layouts of two ranks."""

from __future__ import annotations

import pytest
from step_contract import StepContract


class TestReplicas(StepContract):
    """Each rank has the whole model, and its part of the optimizer."""


@pytest.mark.full
class TestStages(StepContract):
    """Ranks are two stages of one replica."""

    layout = {"pp": 2}  # noqa: RUF012


@pytest.mark.full
class TestSharedExperts(StepContract):
    """Ranks are two replicas that meet in layers with experts, in 16 bits."""

    layout = {  # noqa: RUF012
        "ep": 2,
        "experts": 4,
        "dtype": "bf16",
        "distributed_optimizer": False,
    }
