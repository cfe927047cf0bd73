"""The case files of a source tree that is on the path without being installed.

An install has them inside of this package, or maps the tree's folder `patches/` there; on a bare
`PYTHONPATH` they lie beside it. Imported only where they are not inside.
"""

from __future__ import annotations

import os

PACKAGE = "megatron_idempotent.patches"


def load_case_files(path: list[str]) -> None:
    """Import `megatron_idempotent.patches`, its only name, from the folder beside the package.

    Comes before any other finder: an editable install of another tree would answer with that
    tree's case files.

    Args:
        path: the package's `__path__`.

    Raises:
        ImportError: they are not there, nor installed.
    """
    root = os.path.dirname(path[0])
    if _is_ours(os.path.join(root, "patches", "__init__.py")):
        path.append(root)
        try:
            __import__(PACKAGE)
        finally:
            # At once, or whatever else lies there could be imported as a part of the package.
            path.remove(root)
        return
    from importlib.util import find_spec

    if find_spec(PACKAGE) is None:
        raise ImportError(
            f"{PACKAGE} is neither installed nor beside this package, in {root}: install the "
            "project (pip install megatron-idempotent), or put its whole source tree on the path",
            name=PACKAGE,
        )


def _is_ours(file: str) -> bool:
    """Tell our folder from any other that happens to be called `patches`."""
    try:
        with open(file, encoding="utf-8") as source:
            return PACKAGE in source.read()
    except (OSError, UnicodeDecodeError):
        return False
