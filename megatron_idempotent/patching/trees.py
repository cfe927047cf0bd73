"""Reads source that is not on the path: of a checkout, an unpacked wheel, a wheel.

It is Megatron's, or that of a framework that carries copies of its code. Nothing is imported,
installed or unpacked. A release is told from a development commit by its contents.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from .catalog import MEGATRON
from .decide import (
    UNKNOWN,
    Installed,
    check_bodies,
    from_metadata_text,
    from_package_info,
    in_range,
    installed,
    numbers,
    package_of,
)
from .record import Patch
from .source import Body, computed, parse_body, read_text
from .surroundings import modules_in

#: The module that says which version a Megatron is.
INFO = "megatron.core.package_info"


class SourceTree:
    """Reads the modules of one Megatron or framework from a folder or a wheel.

    Args:
        path: a folder that holds `megatron/`, `slime/` or the like, or a `.whl` file.
        patches: patches by id, which may have targets in it.

    Raises:
        ValueError: no patch has a target in it, or Megatron's version cannot be read.

    Example:
        SourceTree(Path("Megatron-LM"), patches()).body("megatron.training.training", "train")
    """

    def __init__(self, path: Path, patches: Mapping[str, Patch]) -> None:
        self.path = path
        self._texts: dict[str, str | None] = {}
        self._wheel = None
        if path.is_file():
            try:
                self._wheel = zipfile.ZipFile(path)
            except zipfile.BadZipFile as error:
                raise ValueError(f"{path} is no wheel: {error}; give a .whl or a folder") from None
        elif not path.is_dir():
            raise ValueError(f"{path} is not there: give a .whl or a folder that holds megatron/")
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
        """The versions in the tree, by distribution; `UNKNOWN` in a checkout that does not say."""
        if not self.versions:
            wanted = sorted(name for names in packages.values() for name in names)
            raise ValueError(
                f"{path} holds none of {', '.join(wanted)}: give a .whl or the folder above one"
            )

    def text(self, module: str) -> str | None:
        """Return the module's source, or None if it is not in the tree."""
        if module not in self._texts:
            self._texts[module] = self._text(module)
        return self._texts[module]

    def _text(self, module: str) -> str | None:
        stem = module.replace(".", "/")
        for name in (f"{stem}.py", f"{stem}/__init__.py"):
            if self._has(name):
                if self._wheel is not None:
                    return self._wheel.read(name).decode("utf-8")
                return read_text(self.path / name)
        return None

    def body(self, module: str, qualname: str) -> Body | None:
        """Return the body of a function, or None if the tree lacks it.

        Raises:
            SyntaxError: this Python cannot parse the module.
        """
        text = self.text(module)
        return None if text is None else parse_body(text, qualname)

    def beside(self, module: str) -> list[str]:
        """Return the modules in the module's folder, itself included."""
        stem = module.replace(".", "/")
        package = module if self._has(f"{stem}/__init__.py") else module.rpartition(".")[0]
        folder = package.replace(".", "/")
        if self._wheel is None:
            return modules_in(package, [path.name for path in (self.path / folder).glob("*.py")])
        inside = (name.rpartition("/") for name in self._files)
        return modules_in(package, [name for where, _, name in inside if where == folder])

    @computed
    def modules(self) -> list[str]:
        """Return the names of all modules in the tree."""
        if self._wheel is None:
            names = [str(path.relative_to(self.path)) for path in self.path.glob("*/**/*.py")]
        else:
            names = [name for name in self._files if name.endswith(".py")]
        dotted = (name[:-3].replace("/", ".").removesuffix(".__init__") for name in names)
        return sorted(dotted)

    def _has(self, name: str) -> bool:
        return name in self._files if self._wheel is not None else (self.path / name).is_file()

    @computed
    def _files(self) -> frozenset[str]:
        return frozenset() if self._wheel is None else frozenset(self._wheel.namelist())

    def _version(self, distribution: str) -> Installed:
        if distribution != MEGATRON:
            said = (from_metadata_text(text, distribution) for text in self._metadata)
            return next((version for version in said if version is not None), UNKNOWN)
        info = self.text(INFO)
        version = None if info is None else from_package_info(info.splitlines())
        if version is None:
            raise ValueError(f"{self.path} says no version in {INFO}: is it Megatron's?")
        return version

    @computed
    def _metadata(self) -> list[str]:
        if self._wheel is not None:
            names = [name for name in self._files if name.endswith(".dist-info/METADATA")]
            return [self._wheel.read(name).decode("utf-8") for name in names]
        files = [*self.path.glob("*.dist-info/METADATA"), *self.path.glob("*.egg-info/PKG-INFO")]
        return [file.read_text(encoding="utf-8") for file in files]


class Contents(NamedTuple):
    """Counts the functions of the installed Megatron that patches wrap."""

    version: str
    """The version that the installed Megatron claims to be."""
    functions: int
    """The number of these functions that it has."""
    others: int
    """The number of them whose body is not the claimed release's."""


def contents(patches: Iterable[Patch]) -> Contents | None:
    """Compare what is installed with the release that it says it is.

    Returns:
        The counts; None if no Megatron is installed.
    """
    version = installed(MEGATRON)
    if version is None:
        return None
    its_own: dict[str, bool] = {}
    for patch in patches:
        if patch.distribution != MEGATRON or not in_range(patch, version):
            continue
        bodies = check_bodies(patch, named=False).bodies
        for target in patch.targets:
            # Where people read parts of a function, its bodies are too many to know each.
            if target.address in bodies and not target.relies_on:
                label = target.label(bodies[target.address].hash)
                own = its_own.get(target.address, False)
                its_own[target.address] = own or _holds(label, version)
    return Contents(version.text, len(its_own), sum(not own for own in its_own.values()))


def _holds(label: str, version: Installed) -> bool:
    """Tell if a body's label, such as `0.12.0 to 0.15.3`, has the version."""
    first, _, last = label.partition(" to ")
    since, until = numbers(first), numbers(last or first)
    # A later patch release of a line has what the last one that was read has.
    return () < since <= version.release and version.release[:2] <= until[:2]
