"""Makes a Hugging Face checkpoint of a folder of safetensors files."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from .layout import Layout

#: Weights, in any format: the files of the checkpoint that are not to be copied.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


def copy_settings(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy config.json, tokenizer and all else at the top of a checkpoint that is not weights, nor
    their hashes."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith((*_WEIGHTS, ".index.json", "SHA256SUMS")):
            shutil.copyfile(path, target / path.name)


def index_of(files: Mapping[str, Layout]) -> dict[str, Any]:
    """The content of model.safetensors.index.json: bytes in total, and each tensor's file."""
    return {
        "metadata": {
            "total_size": sum(info.nbytes for layout in files.values() for info in layout.tensors),
        },
        "weight_map": {
            info.name: name for name, layout in files.items() for info in layout.tensors
        },
    }
