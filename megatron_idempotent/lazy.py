"""Imports a package's public names at first use, and says how to install missing packages.

The base install is for frameworks that pin their own torch and Megatron, so that either may be
missing. This module imports neither.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing would slow `import megatron_idempotent` down
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

_TRAINER = "pip install 'megatron-idempotent[trainer]'"

REMEDIES = {
    **{
        module: f"install the {package} that your framework pins, or {_TRAINER}"
        for module, package in (
            ("megatron", "megatron-core"),
            ("megatron.core", "megatron-core"),
            ("numpy", "numpy"),
            ("torch", "torch"),
        )
    },
    "cloudpickle": "pip install 'megatron-idempotent[notebook]'",
    "shtab": "pip install 'megatron-idempotent[completion]'",
    "aiohttp": "pip install 'megatron-idempotent[http]'",
    "pydantic": "pip install 'megatron-idempotent[controller]', which brings 2.11 or newer",
    **dict.fromkeys(("fsspec", "zstandard"), "pip install 'megatron-idempotent[bucket]'"),
    "ray": "pip install 'megatron-idempotent[ray]'",
    "transfer_queue": "pip install 'megatron-idempotent[transferqueue]'",
    "wandb": "pip install 'megatron-idempotent[wandb]'",
    **dict.fromkeys(
        ("safetensors", "tokenizers", "transformers", "tensorboard", "matplotlib", "rich"), _TRAINER
    ),
}
"""Maps a module that may be missing to the command that installs it."""


def untried_torch(version: str | None = None) -> str | None:
    """Return a sentence if torch is newer than any version that this package was tested with.
    Return None otherwise.

    The newest one is below the upper bound of the extra `trainer`.

    Args:
        version: the torch to judge; None for the installed one.
    """
    # Not at the top: these imports take longer than `apply()`.
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        version = version or metadata.version("torch")
        requirements = map(Requirement, metadata.requires("megatron-idempotent") or ())
    except metadata.PackageNotFoundError:
        return None
    bounds = (
        bound for needed in requirements if needed.name == "torch" for bound in needed.specifier
    )
    for bound in bounds:
        if bound.operator == "<" and not bound.contains(version, prereleases=True):
            return (
                f"torch {version} is newer than any that ranks were run on: if they do not start, "
                f"pip install 'torch{bound}'"
            )
    return None


class naming_the_remedy:
    """Context manager: if its block fails to import a module of `REMEDIES`, the error says how to
    install that module.

    Args:
        feature: the name that the user asked for, such as `megatron_idempotent.TrainStep`.

    Raises:
        ModuleNotFoundError: a module is missing. The error's `name` is that of the module; an error
            about a module that is not in `REMEDIES` is raised unchanged.
    """

    def __init__(self, feature: str) -> None:
        self._feature = feature

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ModuleNotFoundError) and error.name in REMEDIES:
            raise ModuleNotFoundError(
                f"{self._feature} needs {error.name}, which is not installed: "
                f"{REMEDIES[error.name]}",
                name=error.name,
            ) from (error.__cause__ or error)


_homes: dict[str, dict[str, str]] = {}


def homes(package: str) -> Mapping[str, str]:
    """Return public name → module for a package, as the package's `__init__.pyi` declares.

    No other file lists these names. The stub has one import in a line,
    `from .module import name as name`, which type checkers want in a stub and ruff writes.
    """
    if package not in _homes:
        __import__(package)
        module: Any = sys.modules[package]
        path = os.path.join(module.__path__[0], "__init__.pyi")
        stub = module.__spec__.loader.get_data(path).decode()  # a wheel on the path has it, too
        imports = [line.split() for line in stub.splitlines() if line.startswith("from ")]
        _homes[package] = {
            name: f"{package}{source}".rstrip(".") if source.startswith(".") else source
            for _, source, _, name, *_ in imports
        }
    return _homes[package]


def attributes(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a module's `__getattr__` and `__dir__`, which import the package's names at first use.

    `__all__` has the names of the stub, without subpackages (`from . import room as room`).

    Example:
        __getattr__, __dir__ = attributes(__name__)
    """

    def find(name: str) -> Any:
        if name == "__all__":
            return [listed for listed, module in homes(package).items() if module != package]
        module = None if name.startswith("__") else homes(package).get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if module == package:
            __import__(f"{package}.{name}")
            return sys.modules[f"{package}.{name}"]
        with naming_the_remedy(f"{package}.{name}"):
            __import__(module)
            return getattr(sys.modules[module], name)

    return find, lambda: sorted({*vars(sys.modules[package]), *homes(package)})
