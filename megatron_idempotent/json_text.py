"""Parses JSON from outside; every fault in it raises the same kind of error."""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 100
"""The most levels of nested objects and arrays: parsed values are copied and sent by recursion."""
_TOO_DEEP = f"it is nested deeper than {DEEPEST} levels; write it flat"


class JsonError(ValueError):
    """Says that a text is not JSON, is nested too deeply, or has a number that is too long."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; raise `JsonError` for any fault in it.

    Raises:
        JsonError: the text is not acceptable; the caller adds where the text is from.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise JsonError(_TOO_DEEP) from None
    except ValueError as error:
        raise JsonError(str(error)) from error
    level = [value]
    for _ in range(DEEPEST + 1):
        containers = [item for item in level if isinstance(item, (dict, list))]
        if not containers:
            return value
        parts = (item.values() if isinstance(item, dict) else item for item in containers)
        level = [inner for part in parts for inner in part]
    raise JsonError(_TOO_DEEP)
