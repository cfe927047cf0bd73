"""The contract of a step that runs in pieces, which each backend keeps in each layout.

    class TestMyStep(StepContract):
        engine = "megatron"  # or "fsdp": a name that `Bench` knows
        layout = {"pp": 2}

Two ranks run it. Programs of calls in any order are beside it, in `programs`.
"""

from __future__ import annotations

from contract_calls import Calls
from contract_disturbances import Disturbances
from contract_failures import Failures
from contract_refusals import Refusals
from contract_results import Results


class StepContract(Calls, Results, Refusals, Disturbances, Failures):
    """All parts of it."""
