"""Reads source that is not on the path: that of a checkout, an unpacked wheel, or a wheel.

It is Megatron's source, or that of a framework with copies of Megatron's code. It is not imported,
installed or unpacked. A release is told from a development commit by its contents.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from .base import MEGATRON, generated
from .decide import is_older_than_all
from .record import Patch
from .releases import (
    TABLE,
    UNKNOWN,
    Installed,
    Table,
    digest_of,
    from_metadata_text,
    from_package_info,
    is_plain,
    modules_in,
    package_of,
    release_named,
)
from .source import Body, computed, parse_body, read_text

#: The module with Megatron's version.
INFO = "megatron.core.package_info"
#: A wheel's metadata, and the file (PEP 610) of one that was not installed from an index.
_INSTALLED, _ORIGIN = ".dist-info/METADATA", ".dist-info/direct_url.json"


class Files(Protocol):
    """Protocol for the files of a source tree; names are relative paths with slashes."""

    def has(self, name: str) -> bool:
        """Tell if the tree has a file with this relative path."""

    def read(self, name: str) -> str:
        """Return the text of one of the tree's files."""

    def inside(self, folder: str) -> list[str]:
        """Return the names of the files, or files and folders, that are directly in a folder of the
        tree.
        """

    def all(self) -> list[str]:
        """Return the relative paths of the tree's files."""


class Folder:
    """Implements `Files` for a folder on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def has(self, name: str) -> bool:
        """Tell if the folder has a file with this relative path."""
        return (self._path / name).is_file()

    def read(self, name: str) -> str:
        """Return the text of the file with this relative path."""
        return read_text(self._path / name)

    def inside(self, folder: str) -> list[str]:
        """Return the names of the files and folders that are directly in `folder`, a path in the
        tree.
        """
        return [path.name for path in (self._path / folder).glob("*")]

    def all(self) -> list[str]:
        """Return the relative paths of Python sources in subfolders, and of installers'
        metadata.
        """
        paths = [*self._path.glob("*/**/*.py"), *self._path.glob("*-info/*")]
        return [path.relative_to(self._path).as_posix() for path in paths]


class Listed:
    """Implements `Files` for a list of paths, such as a wheel's, and a function that reads one."""

    def __init__(self, names: Iterable[str], read: Callable[[str], str]) -> None:
        self.read = read
        self._folders: dict[str, dict[str, None]] = {}
        for name in names:
            folder, _, file = name.rpartition("/")
            self._folders.setdefault(folder, {})[file] = None

    def has(self, name: str) -> bool:
        """Tell if the list has a file with this path."""
        folder, _, file = name.rpartition("/")
        return file in self._folders.get(folder, ())

    def inside(self, folder: str) -> list[str]:
        """Return the names of the files that are directly in `folder`."""
        return list(self._folders.get(folder, ()))

    def all(self) -> list[str]:
        """Return the paths of all files."""
        return [f"{folder}/{name}" for folder, names in self._folders.items() for name in names]


def _files_at(path: Path) -> Files:
    if path.is_dir():
        return Folder(path)
    if not path.is_file():
        raise ValueError(f"{path} is not there: give a .whl or a folder that holds megatron/")
    try:
        wheel = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is no wheel: {error}; give a .whl or a folder") from None
    return Listed(wheel.namelist(), lambda name: wheel.read(name).decode("utf-8"))


class SourceTree:
    """Reads the modules of one Megatron or framework from a folder, a wheel or a commit.

    Args:
        path: a folder that holds `megatron/`, `slime/` or the like, or a `.whl` file.
        patches: patches by id, some of which have targets in the tree.
        files: the tree's files, if they are not at the path; the path is then only a name.

    Raises:
        ValueError: no patch has a target in the tree, or Megatron's version cannot be read.

    Example:
        SourceTree(Path("Megatron-LM"), patches()).body("megatron.training.training", "train")
    """

    def __init__(
        self, path: Path, patches: Mapping[str, Patch], files: Files | None = None
    ) -> None:
        self.path = path
        self._files = files or _files_at(path)
        self._texts: dict[str, str | None] = {}
        packages: dict[str, set[str]] = {}
        for patch in patches.values():
            names = {package_of(target.module) for target in patch.targets}
            packages.setdefault(patch.distribution, set()).update(names)
        packages[MEGATRON] = {INFO}
        self.versions: dict[str, Installed] = {
            distribution: self._version(distribution)
            for distribution, names in sorted(packages.items())
            if any(self.text(name) is not None for name in names)
        }
        """The versions in the tree, by distribution; `UNKNOWN` in a checkout without a version."""
        if not self.versions:
            paths = sorted(name for names in packages.values() for name in names)
            raise ValueError(
                f"{path} holds none of {', '.join(paths)}: give a .whl or the folder above one"
            )

    def text(self, module: str) -> str | None:
        """Return the module's source, or None if it is not in the tree."""
        if module not in self._texts:
            name = self.file_of(module)
            self._texts[module] = None if name is None else self._files.read(name)
        return self._texts[module]

    def file_of(self, module: str) -> str | None:
        """Return the path of the module's source in the tree, or None if it is not there."""
        stem = module.replace(".", "/")
        names = (f"{stem}.py", f"{stem}/__init__.py")
        return next((name for name in names if self._files.has(name)), None)

    def body(self, module: str, qualname: str) -> Body | None:
        """Return the body of a function, or None if the tree lacks it.

        Raises:
            SyntaxError: this Python cannot parse the module.
        """
        text = self.text(module)
        return None if text is None else parse_body(text, qualname)

    def beside(self, module: str) -> list[str]:
        """Return the names of the modules in the module's folder, its own name included."""
        stem = module.replace(".", "/")
        package = module if self._files.has(f"{stem}/__init__.py") else module.rpartition(".")[0]
        names = self._files.inside(package.replace(".", "/"))
        return modules_in(package, [name for name in names if name.endswith(".py")])

    def is_package(self, module: str) -> bool:
        """Tell if the module is a package, so that its source is an `__init__.py`."""
        return (self.file_of(module) or "").endswith("__init__.py")

    def digest(self, module: str) -> str | None:
        """Return the short SHA-256 (`digest_of`) of the module's file; None if it is missing."""
        text = self.text(module)
        return None if text is None else digest_of(text.encode("utf-8"))

    def release(self, distribution: str) -> Installed | None:
        """Return the release of a distribution in the tree; None for a commit.

        A framework's release is known by the wheel's metadata, Megatron's by the files.
        """
        version = self.versions[distribution]
        if distribution == MEGATRON:
            return version if is_older_than_all(version) else self._megatrons_release
        return version if is_plain(version) and self._is_from_index(distribution) else None

    def _is_from_index(self, distribution: str) -> bool:
        return any(
            name.endswith(_INSTALLED)
            and from_metadata_text(text, distribution) is not None
            and not self._files.has(name.replace(_INSTALLED, _ORIGIN))
            for name, text in self._metadata.items()
        )

    @computed
    def _megatrons_release(self) -> Installed | None:
        release = Table(generated(TABLE)).matching(self, self.versions[MEGATRON].text)
        return None if release is None else release_named(release.version)

    @computed
    def modules(self) -> list[str]:
        """Return the names of all modules in the tree."""
        names = [name for name in self._files.all() if name.endswith(".py") and "/" in name]
        dotted = (name[:-3].replace("/", ".").removesuffix(".__init__") for name in names)
        return sorted(dotted)

    def _version(self, distribution: str) -> Installed:
        if distribution != MEGATRON:
            versions = (from_metadata_text(text, distribution) for text in self._metadata.values())
            return next((version for version in versions if version is not None), UNKNOWN)
        info = self.text(INFO)
        version = None if info is None else from_package_info(info.splitlines())
        if version is None:
            raise ValueError(f"{self.path} says no version in {INFO}: is it Megatron's?")
        return version

    @computed
    def _metadata(self) -> dict[str, str]:
        kinds = (_INSTALLED, ".egg-info/PKG-INFO")
        names = [name for name in self._files.all() if name.endswith(kinds)]
        return {name: self._files.read(name) for name in names if name.count("/") == 1}
