"""Reads and writes the scales of vLLM's key-value cache in FP8, in a worker's attention layers.

vLLM keeps them as buffers of each layer, and as numbers beside them for backends that read those. A
model whose checkpoint is quantised has parameters for them while it is loaded; any other resets
them to 1 with every reload. They are written here after that, the same way for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_idempotent.rl.engines.protocol import EngineUnsupported
from megatron_idempotent.rl.weights import UpdateMismatch

LayerScales = Mapping[str, float]
"""The scales that a layer computes with, by "k", "v" and "q"."""

_LISTED = 5


class CacheScales:
    """Reads, checks and writes the scales of one model.

    Example: `scales = CacheScales(model); scales.check(given); scales.write(scales.read(), given)`.
    """

    def __init__(
        self, model: torch.nn.Module, *, whole: bool = True, doubled: bool = False
    ) -> None:
        """
        Args:
            model: vLLM's model.
            whole: True if it has all layers; a stage of a pipeline ignores names of other layers.
            doubled: True to use scales twice as large, as FP8 on some AMD GPUs needs them.
        """
        self._layers = {name: layer for name, layer in model.named_modules() if _has_scales(layer)}
        self._whole = whole
        self._factor = 2.0 if doubled else 1.0

    def check(self, given: Mapping[str, float]) -> None:
        """Raise an error unless the model can take these scales.

        Errors: `EngineUnsupported` if no cache is in FP8; `UpdateMismatch` for names of no layer,
            and for layers that lack the scale of their keys or values.
        """
        if not self._layers:
            raise EngineUnsupported(
                f"{len(given)} kv_scales came, and no layer here has a key-value cache in FP8 with "
                "a scale per tensor; start vLLM with --kv-cache-dtype fp8, or leave kv_scales out"
            )
        found, unknown = self._by_layer(given)
        missing = [
            f"{layer}.{which}_scale"
            for layer in self._layers
            for which in ("k", "v")
            if which not in found.get(layer, {})
        ]
        if unknown and self._whole:
            raise UpdateMismatch(
                f"kv_scales name no layer of the model: {_listed(unknown)}; it has "
                f"{_listed(list(self._layers))}"
            )
        if missing:
            raise UpdateMismatch(f"kv_scales lack {_listed(missing)}; give those of all layers")

    def read(self) -> dict[str, LayerScales]:
        """Return the scales that are in use, by layer."""
        return {
            name: {which: float(getattr(layer, f"_{which}_scale")) for which in ("k", "v", "q")}
            for name, layer in self._layers.items()
        }

    def write(self, before: Mapping[str, LayerScales], given: Mapping[str, float] | None) -> None:
        """Write the scales that were in use before, and those that are given in their place."""
        new = self._by_layer(given or {})[0]
        for name, layer in self._layers.items():
            told = {which: value * self._factor for which, value in new.get(name, {}).items()}
            for which, value in {**before.get(name, {}), **told}.items():
                _set(layer, which, value)
            if told:
                layer.calculate_kv_scales = False  # else the next forward would replace them

    def _by_layer(
        self, given: Mapping[str, float]
    ) -> tuple[dict[str, dict[str, float]], list[str]]:
        found: dict[str, dict[str, float]] = {}
        unknown = []
        for name, value in given.items():
            place, _, suffix = name.rpartition(".")
            tried = (place, f"{place}.attn", f"{place}.mla_attn.mla_attn")
            layer = next((each for each in tried if each in self._layers), None)
            if layer is None:
                unknown.append(name)
            else:
                found.setdefault(layer, {})[suffix[0]] = value
        return found, unknown


def _has_scales(layer: Any) -> bool:
    dtype = str(getattr(layer, "kv_cache_dtype", ""))
    # Per token and head they are computed as keys are cached.
    return dtype.startswith("fp8") and "per_token" not in dtype and hasattr(layer, "_k_scale")


def _set(layer: Any, which: str, value: float) -> None:
    # In place: graphs that were captured read this memory.
    buffer = getattr(layer, f"_{which}_scale")
    buffer.fill_(value)
    setattr(layer, f"_{which}_scale_float", buffer.item())  # as float32 rounds it
    on_host = getattr(layer, f"_{which}_scale_cpu", None)
    if on_host is not None:
        on_host.fill_(value)


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
