"""Parses JSON that others wrote: whatever is wrong with it is one error."""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 100
"""The most objects and arrays within each other: what is parsed is copied and sent by recursion."""
_TOO_DEEP = f"it is nested deeper than {DEEPEST} levels; write it flat"


class JsonError(ValueError):
    """A text is no JSON, or JSON that is nested too deeply or has too long a number."""


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text holds. Errors: `JsonError`; its caller names the file."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise JsonError(_TOO_DEEP) from None
    except ValueError as error:
        raise JsonError(str(error)) from error
    level = [found]
    for _ in range(DEEPEST + 1):
        # Its objects and arrays; of the last level there must be none.
        nested = [each for each in level if isinstance(each, (dict, list))]
        if not nested:
            return found
        parts = (each.values() if isinstance(each, dict) else each for each in nested)
        level = [inner for part in parts for inner in part]
    raise JsonError(_TOO_DEEP)
