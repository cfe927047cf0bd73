"""Which release of a distribution is on the path, read without importing it.

Importing `packaging` takes longer than all else that `apply()` does, so Megatron's constants are
compared as numbers, and it is imported only for other distributions.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .source import locate

# megatron-core says its version in a file of its own, which is right for a checkout on PYTHONPATH
# too. The `+<git sha>` that newer files append belongs to whatever repository encloses them, so
# only the four constants are read.
_PACKAGE_INFO = {"megatron-core": "megatron.core.package_info"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """A distribution's version."""

    text: str
    """As the distribution writes it, such as `0.17.0rc0`."""
    release: tuple[int, ...]
    """The release it belongs to or leads to, such as (0, 17, 0)."""


def installed(distribution: str) -> Installed | None:
    """What `import` would find, or None where the distribution is not there."""
    info = _PACKAGE_INFO.get(distribution)
    if info is None:
        return _from_metadata(distribution)
    path = locate(info)
    return None if path is None else _from_package_info(path, path.stat().st_mtime_ns)


def supported(version: Installed, since: str, before: str) -> bool:
    """Whether `since` <= release < `before`, both written like `0.12`.

    Pre-releases count as the release they lead to: `0.17.0rc0` holds 0.17's code, and under plain
    specifier rules it would be in neither `<0.17` nor `>=0.17`.
    """
    return _numbers(since) <= version.release < _numbers(before)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


@cache
def _from_package_info(path: Path, mtime_ns: int) -> Installed | None:
    constants: dict[str, object] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for name in node.targets:
                if isinstance(name, ast.Name):
                    constants[name.id] = node.value.value
    release = [constants.get(part) for part in ("MAJOR", "MINOR", "PATCH")]
    if not all(isinstance(number, int) for number in release):
        return None
    text = ".".join(map(str, release)) + str(constants.get("PRE_RELEASE", ""))
    return Installed(text=text, release=tuple(int(str(number)) for number in release))


def _from_metadata(distribution: str) -> Installed | None:
    from importlib import metadata

    from packaging.version import InvalidVersion, Version

    try:
        version = Version(metadata.version(distribution))
    except (metadata.PackageNotFoundError, InvalidVersion):
        return None
    return Installed(text=str(version), release=version.release)
