"""Finds Megatron's settings for training in FP8, or all that is missing here for it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from packaging.version import Version

from .packing import RECIPES

#: Below those versions Megatron gives Transformer Engine no such recipe (`get_fp8_recipe`).
_ENGINE = {
    "delayed": Version("1.0"),
    "mxfp8": Version("2.1.0"),
    "tensorwise": Version("2.2.0.dev0"),
    "blockwise": Version("2.3.0.dev0"),
}
#: Least compute capability, and the one from which on there are no such kernels; Transformer
#: Engine's `check_fp8_support`, `check_mxfp8_support` and `check_fp8_block_scaling_support`.
_DEVICE: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = {
    "delayed": ((8, 9), None),
    "tensorwise": ((8, 9), None),
    "blockwise": ((9, 0), None),
    "mxfp8": ((10, 0), (12, 0)),
}
_BLOCKWISE_CUDA = Version("12.9")
#: Fields of the configurations, and what each is in `megatron.training`'s arguments.
_TRANSFORMER, _DDP, _OPTIMIZER = (
    ("megatron.core.transformer.transformer_config", "TransformerConfig"),
    ("megatron.core.distributed", "DistributedDataParallelConfig"),
    ("megatron.core.optimizer", "OptimizerConfig"),
)


class Fp8Settings(NamedTuple):
    """Holds the fields of each configuration: `TransformerConfig(**settings.transformer, …)`."""

    transformer: dict[str, Any]
    ddp: dict[str, Any]
    optimizer: dict[str, Any]

    def arguments(self) -> dict[str, Any]:
        """Return the same fields by the names of `megatron.training`'s arguments."""
        named = {**self.transformer, **self.ddp, **self.optimizer}
        return {name: value for name, value in named.items() if name != "fp8_param"}


def fp8_settings(
    recipe: Literal["delayed", "tensorwise", "mxfp8", "blockwise"],
    *,
    fp8: Literal["e4m3", "hybrid"] | None = None,
    fp8_param: bool = False,
    features: Mapping[str, int] | None = None,
) -> Fp8Settings:
    """Return the fields to set in Megatron's configurations, if all that FP8 needs is there.

    Args:
        recipe: Megatron's `fp8_recipe`.
        fp8: "e4m3", or "hybrid" for gradients in E5M2. None takes the latter for scales of whole
            tensors and "e4m3" for scales of blocks, as Transformer Engine's own recipes do.
        fp8_param: True keeps the layers' weights in FP8, and gathers them so.
        features: the sizes of the model's matrices on one rank, by name, as in
            {"hidden_size": 4096, "ffn_hidden_size / tp": 14336 // 8}.

    Raises:
        ValueError: no such recipe, or something is missing; the message names all of it:
            Transformer Engine and its version, a CUDA device and its compute capability, the
            recipe in this release of Megatron, sizes that the kernels do not take.

    Example:
        from megatron.core.transformer import TransformerConfig
        settings = fp8_settings("blockwise", features={"hidden_size": 4096})
        config = TransformerConfig(**shape, **settings.transformer)
        alignment = TokenAlignment.of_config(config)
    """
    if recipe not in RECIPES:
        raise ValueError(f"fp8_settings() got recipe {recipe!r}; allowed: {', '.join(RECIPES)}")
    if fp8 not in ("e4m3", "hybrid", None):
        raise ValueError(f"fp8_settings() got fp8={fp8!r}; allowed: 'e4m3', 'hybrid', None")
    missing = [
        *_of_megatron(recipe, fp8_param),
        *_of_engine(recipe),
        *_of_device(recipe),
        *_of_features(recipe, features or {}),
    ]
    if missing:
        listed = "".join(f"\n- {each}" for each in missing)
        raise ValueError(f"fp8_recipe={recipe!r} cannot be trained with here:{listed}")
    default = "e4m3" if recipe in ("mxfp8", "blockwise") else "hybrid"
    transformer = {"fp8": fp8 or default, "fp8_recipe": recipe, "fp8_param": fp8_param}
    # Megatron gathers MXFP8 weights in the memory of gradients, and without that holds them twice.
    reuse = {"reuse_grad_buf_for_mxfp8_param_ag": True} if fp8_param and recipe == "mxfp8" else {}
    ddp = {"fp8_param_gather": fp8_param, **reuse}
    optimizer = {"fp8_recipe": recipe, **reuse} if _has(_OPTIMIZER, "fp8_recipe") else {}
    return Fp8Settings(transformer, ddp, optimizer)


def _of_megatron(recipe: str, fp8_param: bool) -> list[str]:
    try:
        enums = importlib.import_module("megatron.core.enums")
        version = importlib.import_module("megatron.core").__version__
    except ModuleNotFoundError as missing:
        return [f"megatron.core: {missing}; install megatron-core"]
    if recipe not in enums.Fp8Recipe.__members__:
        known = ", ".join(enums.Fp8Recipe.__members__)
        return [f"Megatron {version} has {known}; {recipe} needs a later release"]
    if fp8_param and recipe == "mxfp8" and not _has(_DDP, "reuse_grad_buf_for_mxfp8_param_ag"):
        return [f"Megatron {version} has no fp8_param with mxfp8; it needs a later release"]
    return []


def _has(config: tuple[str, str], field: str) -> bool:
    module, name = config
    return field in getattr(importlib.import_module(module), name).__dataclass_fields__


def _of_engine(recipe: str) -> list[str]:
    needed = _ENGINE[recipe]
    try:
        engine = importlib.import_module("transformer_engine")
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as reason:
        # A wheel for another torch or CUDA lacks a library, or finds itself installed in part.
        return [
            f"Transformer Engine cannot be imported ({reason}): install "
            f"transformer-engine[pytorch] from {needed} on, built for torch {torch.__version__}"
        ]
    if Version(engine.__version__) < needed:
        return [f"Transformer Engine {engine.__version__}: {recipe} needs {needed} or later"]
    return []


def _of_device(recipe: str) -> list[str]:
    least, end = _DEVICE[recipe]
    wanted = f"compute capability {least[0]}.{least[1]} or higher"
    if end is not None:
        wanted += f", below {end[0]}.{end[1]}"
    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        return [f"no CUDA device (torch {torch.__version__} with {build}): one of {wanted}"]
    missing = []
    found = torch.cuda.get_device_capability()
    if found < least or (end is not None and found >= end):
        missing.append(
            f"{torch.cuda.get_device_name()} has compute capability {found[0]}.{found[1]}: "
            f"{recipe} needs {wanted}"
        )
    if recipe == "blockwise" and Version(torch.version.cuda or "0") < _BLOCKWISE_CUDA:
        missing.append(
            f"torch is built with CUDA {torch.version.cuda}: {recipe} needs {_BLOCKWISE_CUDA}"
        )
    return missing


def _of_features(recipe: str, features: Mapping[str, int]) -> list[str]:
    multiple = 32 if recipe == "mxfp8" else 16
    return [
        f"{name} is {size}: {recipe} takes multiples of {multiple}"
        for name, size in features.items()
        if size % multiple
    ]
