"""Hugging Face checkpoints in and out of Megatron's GPTModel.

    arch = Architecture.read(directory)
    chunks = [build_gpt(arch, arch.transformer_config(tensor_model_parallel_size=2))]
    load_hf(directory, chunks)
    save_hf(MegatronWeights(chunks, arch), new_directory, like=directory)

Importing this package imports neither torch nor Megatron; safetensors is needed to load.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import build_gpt
    from .errors import (
        CheckpointDamaged,
        CheckpointMismatch,
        FailedElsewhere,
        UnsupportedArchitecture,
    )
    from .export import MegatronWeights
    from .families import Architecture
    from .fsdp import FSDPWeights
    from .load import load_hf
    from .save import save_hf

_HOMES = {
    "Architecture": "families",
    "CheckpointDamaged": "errors",
    "CheckpointMismatch": "errors",
    "FSDPWeights": "fsdp",
    "FailedElsewhere": "errors",
    "MegatronWeights": "export",
    "UnsupportedArchitecture": "errors",
    "build_gpt": "build",
    "load_hf": "load",
    "save_hf": "save",
}

__all__ = [
    "Architecture",
    "CheckpointDamaged",
    "CheckpointMismatch",
    "FSDPWeights",
    "FailedElsewhere",
    "MegatronWeights",
    "UnsupportedArchitecture",
    "build_gpt",
    "load_hf",
    "save_hf",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from megatron_idempotent.missing import naming_the_remedy

        with naming_the_remedy(f"{__name__}.{name}"):
            return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
