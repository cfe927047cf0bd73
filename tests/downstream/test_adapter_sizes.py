"""Adapters are to be read and pasted, so they stay short."""

from __future__ import annotations

import pytest
from adapters import EXAMPLES


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_adapter_has_at_most_sixty_lines(path):
    assert len(path.read_text().splitlines()) <= 60
