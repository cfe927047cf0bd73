"""Puts a copy of this project in the place of the installed one, as an editable install would."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_idempotent.cli.findings import recorded

FINDER = """
import importlib.machinery, importlib.util, os, sys
class Patches:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "megatron_idempotent.patches":
            file = os.path.join(os.environ["COPY"], "patches", "__init__.py")
            return importlib.util.spec_from_file_location(name, file)
# After what looks into folders, before what the editable install has put there.
sys.meta_path.insert(sys.meta_path.index(importlib.machinery.PathFinder) + 1, Patches)
"""


def environ_of(copy: Path, finder: Path, *before: str) -> dict[str, str]:
    """Return what the environment of a program has to hold so that it imports the copy.

    Args:
        copy: the project's folder.
        finder: a folder that may be written to.
        before: folders that come first on the path.
    """
    finder.mkdir(exist_ok=True)
    (finder / "sitecustomize.py").write_text(FINDER)
    path = [*before, str(copy), str(finder)]
    return {"PYTHONPATH": os.pathsep.join(path), "COPY": str(copy)}


def proven_on_a_commit(hazard: str) -> bool:
    """Tell if a commit has the hazard: it may call itself by a release that has repaired it."""
    commits = [found for name, found in recorded().items() if not name.replace(".", "").isdecimal()]
    return any(found.get(hazard) == "proven" for found in commits)
