"""Lets tests define wrappers: their contracts are derived as the casebook derives all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from contracts import derived

from megatron_idempotent.patching import contract


@pytest.fixture(autouse=True)
def contracts_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Derive a contract that `contracts.txt` lacks."""
    generated = contract.contract_of

    def contract_of(wrapper: Callable[..., Any]) -> contract.Contract:
        is_generated = contract.name_of(wrapper) in contract.contracts()
        return generated(wrapper) if is_generated else derived(wrapper)

    monkeypatch.setattr(contract, "contract_of", contract_of)
