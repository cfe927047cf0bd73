"""The patch engine: record → decide → install → report.

`record` and `source` know nothing of the others; `decide` reads both; `sites` changes live objects;
`control` is the one place that holds state and the lock. Nothing here imports torch or Megatron.
"""

from .calls import arguments
from .errors import PatchError, UnknownPatchError, VerificationError
from .record import Patch, Reproduction, Target
from .source import Body

__all__ = [
    "Body",
    "Patch",
    "PatchError",
    "Reproduction",
    "Target",
    "UnknownPatchError",
    "VerificationError",
    "arguments",
]
