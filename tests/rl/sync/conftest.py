"""Buckets lie in memory, where no program that is not a test may have them."""

from __future__ import annotations

import uuid

import pytest

from megatron_idempotent.rl.weights import urls


@pytest.fixture(autouse=True)
def stores_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "SCHEMES", urls.SCHEMES | {"memory"})


@pytest.fixture
def place() -> str:
    """The URL of a bucket that nothing was written to."""
    return f"memory://{uuid.uuid4().hex}/weights"
