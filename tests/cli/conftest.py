"""A checkout of Megatron, for tests of `drift`."""

from __future__ import annotations

from pathlib import Path

import pytest
from ad_hoc import contracts_of_tests  # noqa: F401  # a fixture for all tests here
from checkouts import checkout_of_installed


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with the files of the installed Megatron that patches wrap or read."""
    return checkout_of_installed(tmp_path / "checkout")
