"""Finds the case files of a source tree that is on the path without being installed.

An installed package contains them; an editable install maps the tree's folder `patches/` into the
package. On a bare `PYTHONPATH` they lie beside the package, and this module imports them.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

PACKAGE = "megatron_idempotent.patches"


def load_case_files(path: list[str]) -> None:
    """Import the case files in the folder `patches` beside the package, as in a source tree, under
    the name `megatron_idempotent.patches`. Import nothing if that name finds the same files anyway,
    or if there are none beside the package and an install has them.

    An editable install of another tree would import that tree's case files under the same name;
    importing these first prevents it.

    Args:
        path: the package's `__path__`.

    Raises:
        ImportError: case files are neither beside the package nor installed.
    """
    root = os.path.dirname(path[0])
    case_files = os.path.join(root, "patches", "__init__.py")
    installed = find_spec(PACKAGE)
    if installed is not None and installed.origin == case_files:
        return
    if _is_ours(case_files):
        path.append(root)
        try:
            __import__(PACKAGE)
        finally:
            # Otherwise other files in that folder could be imported as parts of the package.
            path.remove(root)
    elif installed is None:
        raise ImportError(
            f"{PACKAGE} is neither installed nor beside this package, in {root}: install the "
            "project (pip install megatron-idempotent), or put its whole source tree on the path",
            name=PACKAGE,
        )


def _is_ours(file: str) -> bool:
    """Tell if a file is this project's `patches/__init__.py`, not that of a different package."""
    try:
        with open(file, encoding="utf-8") as source:
            return PACKAGE in source.read()
    except (OSError, UnicodeDecodeError):
        return False
