"""Reads which release of a distribution is on the path, without importing it.

Importing `packaging` takes longer than all else that `apply()` does, so Megatron's constants are
compared as numbers, and it is imported only for other distributions.
"""

from __future__ import annotations

import os

from .base import Record
from .import_hooks import find

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from collections.abc import Iterable

# megatron-core says its version in a file of its own, which is right for a checkout on PYTHONPATH
# too. The `+<git sha>` that newer files append belongs to whatever repository encloses them, so
# only the four constants are read.
_PACKAGE_INFO = {"megatron-core": "megatron.core.package_info"}


class Installed(Record):
    """Holds a distribution's version."""

    text: str
    """The version as the distribution writes it, such as `0.17.0rc0`."""
    release: tuple[int, ...]
    """The release that the version belongs to or leads to, such as (0, 17, 0)."""


def installed(distribution: str) -> Installed | None:
    """Return the version of what `import` would find; None if there is none, or it has none."""
    info = _PACKAGE_INFO.get(distribution)
    if info is None:
        return _from_metadata(distribution)
    path = find(info)
    if path is None:
        return None
    try:
        return _from_package_info(path, os.stat(path).st_mtime_ns)
    except (OSError, UnicodeDecodeError):
        return None


UNKNOWN = Installed(text="unknown", release=())
"""The version of a package on the path without metadata, such as a checkout."""


def absence(distribution: str) -> str:
    """Say why `installed` returns None, as a clause."""
    info = _PACKAGE_INFO.get(distribution)
    path = None if info is None else find(info)
    if path is None:
        return f"{distribution} is not installed"
    return f"no version of {distribution} can be read from {path}"


def supported(version: Installed, since: str, before: str) -> bool:
    """Return whether `since` <= release < `before`, both written like `0.12`.

    Pre-releases count as the release they lead to: `0.17.0rc0` holds 0.17's code, and under plain
    specifier rules it would be in neither `<0.17` nor `>=0.17`.
    """
    return numbers(since) <= _significant(version.release) < numbers(before)


def numbers(text: str) -> tuple[int, ...]:
    """Return a release like `0.12` as numbers to compare; none for any other text."""
    parts = text.split(".")
    return _significant(tuple(map(int, parts))) if all(map(str.isdecimal, parts)) else ()


def place(name: str) -> tuple[bool, tuple[int, ...], str]:
    """Return a key that sorts releases by number, and commits after them by name.

    Example: `sorted(["main", "0.9", "0.12.3"], key=place) == ["0.9", "0.12.3", "main"]`.
    """
    return not numbers(name), numbers(name), name


def _significant(release: tuple[int, ...]) -> tuple[int, ...]:
    while release and release[-1] == 0:  # 0.12 and 0.12.0 are one release
        release = release[:-1]
    return release


# The version that a file says, with the time at which it did.
_read: dict[tuple[str, int], Installed | None] = {}


def _from_package_info(path: str, mtime_ns: int) -> Installed | None:
    if (path, mtime_ns) not in _read:
        with open(path, encoding="utf-8") as file:
            _read[path, mtime_ns] = from_package_info(file)
    return _read[path, mtime_ns]


def from_package_info(lines: Iterable[str]) -> Installed | None:
    """Return the version that the lines of a `package_info.py` say, or None."""
    # Line by line, because these are plain assignments and `ast` takes longer to import than the
    # rest of this file to run.
    constants: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition("=")
        constants[name.rstrip()] = value.partition("#")[0].strip()
    release = [constants.get(part, "") for part in ("MAJOR", "MINOR", "PATCH")]
    if not all(number.isdecimal() for number in release):
        return None
    text = ".".join(release) + constants.get("PRE_RELEASE", "").strip("'\"")
    return Installed(text=text, release=tuple(map(int, release)))


def from_metadata_text(text: str, distribution: str) -> Installed | None:
    """Return the version that a wheel's METADATA says; None for another distribution's."""
    from email import message_from_string

    from packaging.utils import canonicalize_name

    said = message_from_string(text)
    if canonicalize_name(said["Name"] or "") != canonicalize_name(distribution):
        return None
    return _parsed(said["Version"] or "")


def _from_metadata(distribution: str) -> Installed | None:
    from importlib import metadata

    try:
        return _parsed(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None


def _parsed(text: str) -> Installed | None:
    from packaging.version import InvalidVersion, Version

    try:
        version = Version(text)
    except InvalidVersion:
        return None
    return Installed(text=str(version), release=version.release)
