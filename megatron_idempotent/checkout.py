"""Finds the case files of a source tree that is on the path without being installed.

An install has them inside of this package, or maps the tree's folder `patches/` there; on a bare
`PYTHONPATH` they lie beside it. This module is imported only if they are not inside.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

PACKAGE = "megatron_idempotent.patches"


def load_case_files(path: list[str]) -> None:
    """Import this tree's case files as `megatron_idempotent.patches`, unless an install finds them.

    An editable install of another tree would import that tree's case files under the same name;
    importing these first prevents it.

    Args:
        path: the package's `__path__`.

    Raises:
        ImportError: case files are neither beside the package nor installed.
    """
    root = os.path.dirname(path[0])
    beside = os.path.join(root, "patches", "__init__.py")
    installed = find_spec(PACKAGE)
    if installed is not None and installed.origin == beside:
        return
    if _is_ours(beside):
        path.append(root)
        try:
            __import__(PACKAGE)
        finally:
            # At once, or whatever else lies there could be imported as a part of the package.
            path.remove(root)
    elif installed is None:
        raise ImportError(
            f"{PACKAGE} is neither installed nor beside this package, in {root}: install the "
            "project (pip install megatron-idempotent), or put its whole source tree on the path",
            name=PACKAGE,
        )


def _is_ours(file: str) -> bool:
    """Return whether a file is that of our folder, not of another one called `patches`."""
    try:
        with open(file, encoding="utf-8") as source:
            return PACKAGE in source.read()
    except (OSError, UnicodeDecodeError):
        return False
