"""The patch engine: record → decide → install → report.

`record`, `finding` and `source` know nothing of the others; `decide` reads them; `sites` changes
live objects; `landing` holds the state and the lock; `late` waits for imports; `control` and
`verify` are what users call. Nothing here imports torch or Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .calls import arguments
from .errors import PatchError, UnknownPatchError, VerificationError
from .record import OPEN, Helper, Limit, Patch, Reproduction, Target

if TYPE_CHECKING:
    from .source import Body

__all__ = [
    "OPEN",
    "Body",
    "Helper",
    "Limit",
    "Patch",
    "PatchError",
    "Reproduction",
    "Target",
    "UnknownPatchError",
    "VerificationError",
    "arguments",
]


def __getattr__(name: str) -> Any:
    if name == "Body":
        # Reading bodies needs ast and re, which apply() before Megatron's import does without.
        from .source import Body

        return Body
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
