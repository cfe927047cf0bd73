"""Makes NVIDIA Megatron's train path safe to call again, with patches that know its versions.

    import megatron_idempotent
    megatron_idempotent.apply()

Importing the package changes nothing, and imports neither torch nor Megatron. `apply()` imports
neither of them: its patches land when Megatron is imported, or at once if it already is. The stub
`__init__.pyi` lists the public names; each is imported at its first use.
"""

from __future__ import annotations

import os
import sys

if not os.path.isdir(os.path.join(__path__[0], "patches")):
    from .checkout import load_case_files

    load_case_files(__path__)

from megatron_idempotent.lazy import attributes

__version__ = "0.1.0"

__getattr__, __dir__ = attributes(__name__)


class _Package(type(sys)):  # the type of modules, without importing types
    """Module type of this package.
    The module then pickles as a reference, even if functions of the package are pickled by value.

    cloudpickle would copy the module's globals, which contain the module, and never end.
    """

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return __import__, (self.__name__,)


sys.modules[__name__].__class__ = _Package
