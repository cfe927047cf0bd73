"""Copies the files of the installed Megatron that patches wrap or read, as a checkout has them."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.source import locate
from megatron_idempotent.patching.surroundings import table
from megatron_idempotent.patching.trees import INFO


def checkout_of_installed(root: Path) -> Path:
    """Write the copy into a folder that is not there yet; return the folder."""
    modules = {INFO} | {t.module for patch in patches().values() for t in patch.targets}
    modules |= {m for needs in table().values() for need in needs.names for m in need.modules}
    for module in modules:
        source = locate(module)
        if source is None:
            continue  # wheels before 0.17 lack megatron.training
        stem = root / module.replace(".", "/")
        package = source.name == "__init__.py"
        copy = stem / "__init__.py" if package else stem.with_suffix(".py")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    return root


def zipped(root: Path, wheel: Path) -> Path:
    """Write the files of a checkout into a wheel; return its path."""
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in filter(Path.is_file, root.rglob("*")):
            archive.write(file, file.relative_to(root))
    return wheel


def info_of(release: str) -> str:
    """Return the text of `package_info.py` in this release."""
    major, minor, patch = release.split(".")[:3]
    number, rc, count = patch.partition("rc")
    return f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {number}\nPRE_RELEASE = '{rc}{count}'\n"
