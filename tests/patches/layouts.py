"""Lists which layouts of a test run always, and which where everything is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_of(layouts: Iterable[str], *always: str) -> list[Any]:
    """Test parameters: these `always`, the others with `-m exhaustive`."""
    return [
        pytest.param(layout, marks=() if layout in always else pytest.mark.exhaustive)
        for layout in layouts
    ]
