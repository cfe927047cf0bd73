"""`FSDPTrainStep` keeps the contract of all steps."""

from __future__ import annotations

from step_contract import StepContract


class TestSharded(StepContract):
    """Ranks meet in each layer."""

    engine = "fsdp"
    tables = ("batches", "counted", "shapes", "uncut")
