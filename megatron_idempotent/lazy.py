"""Names that are imported at first use, and what brings a package that is missing.

The base install is for frameworks that pin their own torch and Megatron, so that neither is there
for certain. Free of both.
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
"""The way to get a module, by its name: an extra of ours, or the caller's framework."""


@contextmanager
def naming_the_remedy(what: str) -> Iterator[None]:
    """Inside, a missing package of REMEDIES raises an error that says what brings it.

    Args:
        what: the name that the user asked for, such as `megatron_idempotent.TrainStep`.

    Raises:
        ModuleNotFoundError: with the `name` of the module that is missing; any other passes as is.
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
    """Returns the `__getattr__` of a package whose public names are imported at first use.

    Args:
        package: the package's `__name__`.
        homes: the module of each name, from the package on: `{"load_hf": "load"}`, or
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
