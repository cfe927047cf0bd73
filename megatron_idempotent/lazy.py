"""Imports a package's public names at first use, and says how to install what is missing.

The base install is for frameworks that pin their own torch and Megatron, so that either may be
missing. This module imports neither.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # `import megatron_idempotent; apply()` comes by, and typing takes time
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
"""Says, for each module that may be missing, how to install it."""


def untried_torch(version: str | None = None) -> str | None:
    """Return a line about a torch that is newer than any that ranks were run on, else None.

    The newest one is below the upper bound of the extra `trainer`.

    Args:
        version: the torch to judge; None for the installed one.
    """
    # Here, because they take longer than all that `apply()` does.
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        found = version or metadata.version("torch")
        wanted = map(Requirement, metadata.requires("megatron-idempotent") or ())
    except metadata.PackageNotFoundError:
        return None
    bounds = (each for one in wanted if one.name == "torch" for each in one.specifier)
    for bound in bounds:
        if bound.operator == "<" and not bound.contains(found, prereleases=True):
            return (
                f"torch {found} is newer than any that ranks were run on: if they do not start, "
                f"pip install 'torch{bound}'"
            )
    return None


class naming_the_remedy:
    """Say in the error, if a package of `REMEDIES` is missing within the block, how to install it.

    Args:
        what: the name that the user asked for, such as `megatron_idempotent.TrainStep`.

    Raises:
        ModuleNotFoundError: a module is missing, whose name is the error's `name`; an error for a
            module that is not in `REMEDIES` is raised unchanged.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ModuleNotFoundError) and error.name in REMEDIES:
            raise ModuleNotFoundError(
                f"{self._what} needs {error.name}, which is not installed: {REMEDIES[error.name]}",
                name=error.name,
            ) from (error.__cause__ or error)


_homes: dict[str, dict[str, str]] = {}


def homes(package: str) -> Mapping[str, str]:
    """Return the module that has each name of a package, as the package's `__init__.pyi` says.

    The stub is the one place of these names. It has an import a line,
    `from .module import name as name`, as type checkers ask of a stub and ruff writes it.
    """
    if package not in _homes:
        __import__(package)
        found: Any = sys.modules[package]
        path = os.path.join(found.__path__[0], "__init__.pyi")
        stub = found.__spec__.loader.get_data(path).decode()  # out of a wheel on the path, too
        imports = [line.split() for line in stub.splitlines() if line.startswith("from ")]
        _homes[package] = {
            name: f"{package}{module}".rstrip(".") if module.startswith(".") else module
            for _, module, _, name, *_ in imports
        }
    return _homes[package]


def attributes(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports its names at first use.

    Its `__all__` are the names of its stub, without its rooms (`from . import room as room`).

    Example:
        __getattr__, __dir__ = attributes(__name__)
    """

    def find(name: str) -> Any:
        if name == "__all__":
            return [each for each, module in homes(package).items() if module != package]
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
