"""Tells which release of Megatron is on the path, by the contents of its files.

The branch main has the number of the next release months before that is published, so a version is
only a claim. `releases.txt` has, for each known release, the SHA-256 of every module that patches
read. A tree with these files is that release. Any other tree is a commit, or a changed release; its
version number says nothing about its code, and the bodies of its functions decide.

For a release the table also lists which patches land, so that no source has to be parsed.

Importing `packaging` takes longer than the rest of `apply()`, so Megatron's version is compared as
numbers, and `packaging` is imported only for other distributions.
"""

from __future__ import annotations

import os

from .base import MEGATRON, Record, generated
from .import_hooks import find

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Protocol

    class Sources(Protocol):
        """Reads the source of modules, on the path or in another tree."""

        def text(self, module: str) -> str | None:
            """Return the module's source, or None if there is none."""

        def digest(self, module: str) -> str | None:
            """Return the short SHA-256 (`digest_of`) of the module's file; None without a file."""

        def beside(self, module: str) -> list[str]:
            """Return the names of the modules in the module's folder, its own name included."""

        def is_package(self, module: str) -> bool:
            """Tell if the module is a package, so that its source is an `__init__.py`."""


# megatron-core has its version in a file of its own, which is right for a checkout on PYTHONPATH
# too. The `+<git sha>` that newer files append is that of any repository around them, so
# only the four constants are read.
_PACKAGE_INFO = {"megatron-core": "megatron.core.package_info"}


class Installed(Record):
    """Holds a distribution's version, as text and as the numbers of its release."""

    text: str
    """The version as the distribution writes it, such as `0.17.0rc0`."""
    release: tuple[int, ...]
    """The numbers of the release, or of the one that a pre-release precedes, such as (0, 17, 0)."""


def installed(distribution: str) -> Installed | None:
    """Return the version of the distribution that `import` would find; None if it is not installed,
    or its version cannot be read.
    """
    info = _PACKAGE_INFO.get(distribution)
    if info is None:
        return _from_metadata(distribution)
    path = find(info)
    if path is None:
        return None
    try:
        state = path, os.stat(path).st_mtime_ns
        if state not in _read:
            with open(path, encoding="utf-8") as file:
                _read[state] = from_package_info(file)
        return _read[state]
    except (OSError, UnicodeDecodeError):
        return None


def package_of(module: str) -> str:
    """Return the top-level package of a module, such as `slime`; below `megatron` the first two
    parts, such as `megatron.core`.
    """
    # megatron itself is a namespace that several distributions share.
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "megatron" else 1])


UNKNOWN = Installed(text="unknown", release=())
"""The version of a package on the path without metadata, such as a checkout."""


def absence(distribution: str) -> str:
    """Return the reason why `installed(distribution)` is None, for a message: it is not installed,
    or its version cannot be read.
    """
    info = _PACKAGE_INFO.get(distribution)
    path = None if info is None else find(info)
    if path is None:
        return f"{distribution} is not installed"
    return f"no version of {distribution} can be read from {path}"


def supported(version: Installed, since: str, before: str) -> bool:
    """Return whether `since` <= `release` < `before`; the bounds are written like `0.12`.

    A pre-release counts as its release: `0.17.0rc0` has 0.17's code, and by the rules of version
    specifiers it would be in neither `<0.17` nor `>=0.17`.
    """
    return numbers(since) <= _significant(version.release) < numbers(before)


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a release like `0.12`, for comparisons; () for any other text."""
    parts = text.split(".")
    return _significant(tuple(map(int, parts))) if all(map(str.isdecimal, parts)) else ()


def release_named(name: str) -> Installed:
    """Return the `Installed` record of a release by its name, such as `0.19.2`."""
    return Installed(text=name, release=tuple(map(int, name.split("."))))


def is_plain(version: Installed) -> bool:
    """Tell if a version is a release's: `0.19.2`, and no pre-release, development or local one."""
    return bool(version.release) and version.text == ".".join(map(str, version.release))


def place(name: str) -> tuple[bool, tuple[int, ...], str]:
    """Return a sort key for the name of a release or a commit.
    Releases are sorted by number, and commits come after them, by name.

    Example: `sorted(["main", "0.9", "0.12.3"], key=place) == ["0.9", "0.12.3", "main"]`.
    """
    return not numbers(name), numbers(name), name


def _significant(release: tuple[int, ...]) -> tuple[int, ...]:
    while release and release[-1] == 0:  # 0.12 and 0.12.0 are one release
        release = release[:-1]
    return release


# (Path, modification time) of a file → the version in it.
_read: dict[tuple[str, int], Installed | None] = {}


def from_package_info(lines: Iterable[str]) -> Installed | None:
    """Return the version in the lines of a `package_info.py`; None if they have no complete
    version.
    """
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
    """Return the version in a wheel's METADATA; None if that is of another distribution."""
    from email import message_from_string

    from packaging.utils import canonicalize_name

    metadata = message_from_string(text)
    if canonicalize_name(metadata["Name"] or "") != canonicalize_name(distribution):
        return None
    return _parsed(metadata["Version"] or "")


def _from_metadata(distribution: str) -> Installed | None:
    from importlib import metadata

    try:
        return _parsed(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None


def from_index(distribution: str) -> bool:
    """Tell if a distribution was installed from a package index: it has no `direct_url.json`, in
    which PEP 610 records any other origin.

    Raises:
        PackageNotFoundError: the distribution has no metadata.
    """
    from importlib import metadata

    return metadata.distribution(distribution).read_text("direct_url.json") is None


def _parsed(text: str) -> Installed | None:
    from packaging.version import InvalidVersion, Version

    try:
        version = Version(text)
    except InvalidVersion:
        return None
    return Installed(text=str(version), release=version.release)


TABLE = "releases.txt"
_CORE = "megatron.core"
_CLAIM = ".package_info"
"""The end of the name of a module that holds only a version; at two releases' tags it is wrong."""
_RELEASES, _FOLDERS = "releases", "folders"
_ABSENT = "-"
#: Characters of a SHA-256 that the table keeps.
DIGITS = 16

LANDS, OUTSIDE, FIXED, UNKNOWN_STANDING = "+", "-", "f", "?"
"""Marks of a patch on a release: it lands; the release is not in its range; upstream has repaired
the hazard; or the bodies have to be read to decide."""


class Release(Record):
    """Holds what `releases.txt` has about one Megatron release: the digests of its files, and for
    each patch a mark that says whether it applies to this release.

    Example:
        Release(version="0.19.2", digests={"megatron.core.timers": "0123456789abcdef"},
                folders=("megatron.core.optimizer",), standings={"gc-stays-off": "+"})
    """

    version: str
    digests: Mapping[str, str | None]
    """Module → `digest_of` the module's file; None for a module that the release lacks."""
    folders: tuple[str, ...]
    """Modules in whose folders patches read every module."""
    standings: Mapping[str, str]
    """Patch → `LANDS`, `OUTSIDE`, `FIXED` or `UNKNOWN_STANDING`."""

    def differing(self, files: Sources) -> Iterator[str]:
        """Yield the name of each module whose file in `files` is not the file of this release.
        Modules that the release lacks are yielded, too.

        Wheels before 0.17 lack `megatron.training`, which a checkout of the release has.
        """
        packages: dict[str, list[str]] = {}
        for module in self.digests:
            packages.setdefault(".".join(module.split(".")[:2]), []).append(module)
        for package, modules in packages.items():
            if package == _CORE or any(files.digest(module) is not None for module in modules):
                yield from self._differing(files, modules)

    def _differing(self, files: Sources, modules: Sequence[str]) -> Iterator[str]:
        for module in modules:
            if files.digest(module) != self.digests[module]:
                yield module
        for folder in self.folders:
            for module in files.beside(folder) if folder in modules else ():
                if module not in self.digests and not module.endswith(_CLAIM):
                    yield module


def digest_of(content: bytes) -> str:
    """Return the first `DIGITS` hexadecimal digits of a file's SHA-256; CRLF counts as LF."""
    import hashlib  # takes milliseconds, and apply() before Megatron's import does not use it

    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()[:DIGITS]


def modules_in(package: str, files: Iterable[str]) -> list[str]:
    """Return the full names of the modules of `package`. `files` are the file names in the folder
    of the package; those that do not end in `.py` are left out.
    """
    stems = sorted(name[:-3] for name in files if name.endswith(".py"))
    return [package if stem == "__init__" else f"{package}.{stem}" for stem in stems]


# (Path, modification time, size) of a file → its digest, which ranks inherit from their launcher.
_file_digests: dict[tuple[str, int, int], str] = {}


def _digest_of_file(path: str) -> str:
    """Return `digest_of` a file's content, read again only if the file has changed."""
    status = os.stat(path)
    state = path, status.st_mtime_ns, status.st_size
    if state not in _file_digests:
        with open(path, "rb") as file:
            _file_digests[state] = digest_of(file.read())
    return _file_digests[state]


class OnPath:
    """Reads the source of modules on the import path without importing them; reads each file and
    folder once.
    """

    def __init__(self) -> None:
        self._texts: dict[str, str | None] = {}
        self._folders: dict[str, list[str]] = {}
        self._digests: dict[str, str | None] = {}

    def text(self, module: str) -> str | None:
        """Return the module's source; None if the module is not found, has no source, or the source
        cannot be read.
        """
        from .source import read_text  # imports ast, which apply() on a release may not need

        if module not in self._texts:
            path = find(module)
            try:
                self._texts[module] = None if path is None else read_text(path)
            except (OSError, UnicodeDecodeError):
                self._texts[module] = None
        return self._texts[module]

    def is_package(self, module: str) -> bool:
        """Tell if the module is a package, so that its source is an `__init__.py`."""
        return (find(module) or "").endswith("__init__.py")

    def digest(self, module: str) -> str | None:
        """Return the shortened SHA-256 (`digest_of`) of the module's file; None if the module has
        no file, or it cannot be read.
        """
        if module not in self._digests:
            path = find(module)
            try:
                self._digests[module] = None if path is None else _digest_of_file(path)
            except OSError:
                self._digests[module] = None
        return self._digests[module]

    def beside(self, module: str) -> list[str]:
        """Return the names of the modules in the module's folder, its own name included."""
        path = find(module)
        if path is None:
            return []
        package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
        if package not in self._folders:
            try:
                names = os.listdir(os.path.dirname(path))
            except OSError:  # in a zip file
                return []
            self._folders[package] = modules_in(package, names)
        return self._folders[package]


class Table:
    """Parses the lines of `releases.txt`, and finds the release that has given files.

    Example:
        Table(generated(TABLE)).release("0.19.2").standings["gc-stays-off"] == "+"
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self.names: list[str] = []
        """The releases, oldest first."""
        self._folders: tuple[str, ...] = ()
        self._digests: dict[str, list[str]] = {}
        self._standings: dict[str, str] = {}
        self._order: dict[str, int] = {}
        for line in lines:
            name, _, digests = line.partition(" ")
            if name == _RELEASES:
                self.names = digests.split()
                self._order = {name: index for index, name in enumerate(self.names)}
            elif name == _FOLDERS:
                self._folders = tuple(digests.split())
            elif "." in name:
                self._digests[name] = digests.split()
            else:
                self._standings[name] = digests

    def release(self, name: str) -> Release | None:
        """Return the table's entry for the release `name`; None if the table does not have it."""
        if name not in self._order:
            return None
        index = self._order[name]
        digests = {module: self._of(index, runs) for module, runs in self._digests.items()}
        return Release(
            version=name,
            digests={module: None if d == _ABSENT else d for module, d in digests.items()},
            folders=self._folders,
            standings={patch_id: marks[index] for patch_id, marks in self._standings.items()},
        )

    def matching(self, files: Sources, claimed: str) -> Release | None:
        """Return the release whose files are all equal to the installed ones, which `files` reads;
        None if there is no such release.

        Args:
            files: reads the files.
            claimed: the version that the files claim, whose release is compared first.
        """
        for name in (claimed, *reversed(self.names)):
            release = self.release(name)
            if release is not None and next(release.differing(files), None) is None:
                return release
        return None

    def _of(self, index: int, runs: Sequence[str]) -> str:
        """Return the digest that a module's file has in the release at `index`. `runs` is a flat
        list of pairs: a release, and the digest that the file has from this release on.
        """
        digest = _ABSENT
        for since, value in zip(runs[::2], runs[1::2], strict=True):
            if self._order[since] > index:
                break
            digest = value
        return digest


def lines_of(releases: Iterable[Release]) -> Iterator[str]:
    """Yield the lines of `releases.txt` for these releases, which have to come oldest first.

    The line of a module has the first release with a digest, then that digest, for each digest.
    """
    order = list(releases)
    yield " ".join([_RELEASES, *(release.version for release in order)])
    yield " ".join([_FOLDERS, *sorted({name for release in order for name in release.folders})])
    for module in sorted({name for release in order for name in release.digests}):
        words, last = [module], _ABSENT
        for release in order:
            digest = release.digests.get(module) or _ABSENT
            if digest != last:
                words += [release.version, digest]
                last = digest
        yield " ".join(words)
    for patch_id in sorted({name for release in order for name in release.standings}):
        marks = [release.standings.get(patch_id, UNKNOWN_STANDING) for release in order]
        yield f"{patch_id} {''.join(marks)}"


class Comparison(Record):
    """Holds the result of comparing Megatron's files on the path with those of releases."""

    claimed: Installed
    """The version that Megatron claims."""
    release: Release | None
    """The release whose files these are; None for a commit or a changed release."""


_compared: list[Comparison] = []


def compared() -> Comparison | None:
    """Compare the files of the Megatron on the path with those of all known releases.
    Return a `Comparison`, which is cached, or None without a Megatron.

    After `forget()` the next call reads the files again.
    """
    claimed = installed(MEGATRON)
    if claimed is None:
        return None
    if not _compared or _compared[0].claimed is not claimed:
        release = Table(generated(TABLE)).matching(OnPath(), claimed.text)
        _compared[:] = [Comparison(claimed=claimed, release=release)]
    return _compared[0]


def forget() -> None:
    """Clear the cached result of `compared()`."""
    _compared.clear()


def release_on_path() -> Release | None:
    """Return the release whose files are on the path; None for a commit, or without Megatron."""
    comparison = compared()
    return None if comparison is None else comparison.release
