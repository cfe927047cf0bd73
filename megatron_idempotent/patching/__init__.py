"""Patches live objects: record → decide → install → report.

`record` and `source` know nothing of the others; `catalog` finds the case files; `contract`
compares a body with a wrapper; `decide` judges a patch by version and bodies; `patch_points`
changes live objects; `install` holds the state and the lock; `import_hooks` waits for imports;
users call `api` and `verify`. Nothing here imports torch or Megatron. Code that `apply()` runs
before Megatron is imported takes nothing from the standard library that a bare interpreter has not
loaded.
"""

from __future__ import annotations

from .base import PatchError, UnknownPatchError, VerificationError
from .catalog import OPEN, UNTRIED

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from typing import Any

    from .record import Helper, Limit, Patch, Target, a_body_has, arguments, no_body_has
    from .source import Body

__all__ = [
    "OPEN",
    "UNTRIED",
    "Body",
    "Helper",
    "Limit",
    "Patch",
    "PatchError",
    "Target",
    "UnknownPatchError",
    "VerificationError",
    "a_body_has",
    "arguments",
    "no_body_has",
]


# What case files need, and apply() before Megatron's import does without.
_LAZY = {
    "Body": "source",
    "Helper": "record",
    "Limit": "record",
    "Patch": "record",
    "Target": "record",
    "a_body_has": "record",
    "arguments": "record",
    "no_body_has": "record",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(__import__(f"{__name__}.{_LAZY[name]}", fromlist=[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
