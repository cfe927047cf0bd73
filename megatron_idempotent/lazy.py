"""Imports a package's public names at first use, and says how to install what is missing.

The base install is for frameworks that pin their own torch and Megatron, so that either may be
missing. This module imports neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
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
    "aiohttp": "pip install 'megatron-idempotent[http]'",
    "pydantic": "pip install 'megatron-idempotent[controller]', which brings 2.11 or newer",
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


@contextmanager
def naming_the_remedy(what: str) -> Iterator[None]:
    """Say in the error, if a package of `REMEDIES` is missing within the block, how to install it.

    Args:
        what: the name that the user asked for, such as `megatron_idempotent.TrainStep`.

    Raises:
        ModuleNotFoundError: a module is missing, whose name is the error's `name`; an error for a
            module that is not in `REMEDIES` is raised unchanged.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in REMEDIES:
            raise
        raise ModuleNotFoundError(
            f"{what} needs {error.name}, which is not installed: {REMEDIES[error.name]}",
            name=error.name,
        ) from (error.__cause__ or error)


def attributes(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports its public names at first use.

    Args:
        package: the package's `__name__`.
        homes: the module that has each name, relative to the package: `{"load_hf": "load"}`, or
            `".metrics.loggers"` for one beside the package.

    Example:
        __getattr__ = attributes(__name__, {"load_hf": "load", "save_hf": "save"})
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with naming_the_remedy(f"{package}.{name}"):
            return getattr(import_module(f".{homes[name]}", package), name)

    return find
