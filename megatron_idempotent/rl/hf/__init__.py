"""Loads Hugging Face checkpoints into Megatron's GPTModel, and saves them from it.

    arch = Architecture.read(directory)
    chunks = [build_gpt(arch, arch.transformer_config(tensor_model_parallel_size=2))]
    load_hf(directory, chunks)
    save_hf(MegatronWeights(chunks, arch), new_directory, like=directory)

Importing this package imports neither torch nor Megatron; safetensors is needed to load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_idempotent.lazy import attributes

if TYPE_CHECKING:
    from megatron_idempotent.rl.weights.safetensors_io import CheckpointDamaged

    from .config import (
        Architecture,
        CheckpointMismatch,
        FailedElsewhere,
        UnsupportedArchitecture,
    )
    from .export import MegatronWeights
    from .fsdp import FSDPWeights
    from .load import build_gpt, load_hf
    from .save import save_hf

_HOMES = {
    "Architecture": "config",
    "CheckpointDamaged": ".weights.safetensors_io",
    "CheckpointMismatch": "config",
    "FSDPWeights": "fsdp",
    "FailedElsewhere": "config",
    "MegatronWeights": "export",
    "UnsupportedArchitecture": "config",
    "build_gpt": "load",
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


__getattr__ = attributes(__name__, _HOMES)
