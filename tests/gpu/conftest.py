"""Tests that are held on every device; those marked `gpu` need a real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_idempotent.proof.cpu.gpu import Device, chosen_device


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder, before `-m` chooses."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.rehearsal)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Device:
    """Return the device of `megatron_ranks`: "cpu", "checked" or "cuda"."""
    return chosen_device(request.config.getoption("--megatron-device"))


@pytest.fixture
def gpu_ranks(device: Device, megatron_ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """`megatron_ranks`, for a test that has nothing to run without a GPU."""
    if device != "cuda":
        pytest.skip("needs a GPU: run with --megatron-device cuda")
    return megatron_ranks
