"""Chooses layouts for tests: some always, the others with `-m exhaustive`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_of(layouts: Iterable[Any], *always: Any) -> list[Any]:
    """Test parameters: these `always`, the others with `-m exhaustive`."""
    return [
        pytest.param(each, marks=() if each in always else pytest.mark.exhaustive)
        for each in layouts
    ]
