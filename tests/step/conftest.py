"""Ranks of a step have the patches from their start: `scenario.build` wants them all."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    *("step_backend", "contract_calls", "contract_results", "contract_refusals"),
    *("contract_disturbances", "contract_failures", "step_programs"),
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Spare ranks their `apply()`, except where there is no Megatron to patch."""
    if not item.path.name.startswith("test_fsdp"):
        item.add_marker("patched")
