"""Say what brings a package that is missing, where the base install does not.

The base install is for frameworks that pin their own torch and Megatron, so that neither is there
for certain. Free of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
