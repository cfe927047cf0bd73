"""Makes NVIDIA Megatron's train path safe to call again, with patches that know its versions.

    import megatron_idempotent
    megatron_idempotent.apply()

Importing the package changes nothing, and imports neither torch nor Megatron. `apply()` imports
neither too: its patches land when Megatron is imported, or at once if it already is. The stub
`__init__.pyi` names all that is here, and where: what this file does not import is imported at its
first use.
"""

from __future__ import annotations

import os
import sys

if not os.path.isdir(os.path.join(__path__[0], "patches")):
    from .checkout import load_case_files

    load_case_files(__path__)

from megatron_idempotent.patching.api import apply, report, revert
from megatron_idempotent.patching.base import PatchError, UnknownPatchError, VerificationError
from megatron_idempotent.patching.report import Report, Row

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    from .lazy import attributes  # not before it is needed: `apply()` does without

    return attributes(__name__)[0](name)


def __dir__() -> list[str]:
    from .lazy import attributes

    return attributes(__name__)[1]()


class _Package(type(sys)):  # the type of modules, without importing types
    """Makes this module pickle as a reference even if the package is pickled by value.

    cloudpickle would copy the module's globals, which lead back to the module, without end.
    """

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return __import__, (self.__name__,)


sys.modules[__name__].__class__ = _Package
