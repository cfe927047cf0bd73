"""Ranks of a step have the patches from their start: `scenario.build` wants them all."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.register_assert_rewrite(
    *("step_backend", "contract_calls", "contract_results", "contract_refusals"),
    *("contract_disturbances", "contract_failures", "step_programs"),
)


@pytest.fixture
def megatron_ranks(request: pytest.FixtureRequest, megatron_ranks: Any) -> Any:
    """Spare ranks their `apply()`, except where there is no Megatron to patch."""
    without = request.path.name.startswith("test_fsdp")
    return megatron_ranks if without else functools.partial(megatron_ranks, already_applied=True)
