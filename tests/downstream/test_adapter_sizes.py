"""Adapters are to be read and pasted, so they stay short; programs to start from, too."""

from __future__ import annotations

import pytest
from adapters import EXAMPLES

ADAPTERS = ("nemo_rl", "skyrl", "verl")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) <= (64 if path.stem in ADAPTERS else 80)
