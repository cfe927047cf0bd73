"""Quantizes weights that are sent to an engine which computes in FP8."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .blockwise import BLOCK, E4M3, Scales, check_cuts, check_scale_shape, quantize_blockwise

#: Modules whose weights engines read unquantized: embeddings, output layers, routers, and the
#: projection of DeepSeek's MTP heads.
NOT_CONVERTED = (
    "embed_tokens",
    "lm_head",
    "shared_head",
    "eh_proj",
    "gate",
    "router",
    "shared_expert_gate",
)
_SCALE = "_scale_inv"
#: Parts of Megatron's names, whose weights are fused differently than an engine's.
_MEGATRON = re.compile(r"(^|\.)decoder\.layers\.\d+\..*linear_|(^|\.)linear_qkv(\.|$)")
#: Weights of several projections → the number of equal pieces that engines cut them into.
_FUSED = {"gate_up_proj": 2, "qkv_proj": None, "query_key_value": None, "qkv": None, "c_attn": None}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Export:
    """Quantizes a model's weight matrices for an engine that computes in FP8, and returns the
    config.json entry that tells the engine which modules stay unquantized.

    Example:
        export = Fp8Export(scales="ue8m0", modules_to_not_convert=("visual",))
        config["quantization_config"] = export.quantization_config(hf_weights())
        for name, tensor in export.weights(hf_weights()):
            send(name, tensor)
    """

    scales: Scales = "float32"
    """The kind of scales: "float32", or "ue8m0" for powers of two, which DeepGEMM needs on
    Blackwell; both are stored in float32."""
    dtype: torch.dtype = torch.bfloat16
    """The weights' type in the engine without FP8; other types are rounded to it first."""
    modules_to_not_convert: tuple[str, ...] = ()
    """Modules that stay unquantized besides embeddings, output layers and routers: whole parts of
    their dotted names, as in "visual" or "layers.0.mlp.down_proj"."""
    pieces: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """The rows of each piece of a fused weight, by the last part of its module's name, as in
    {"qkv_proj": (4096, 1024, 1024)}; gate_up_proj, with two halves, needs no entry."""

    def __post_init__(self) -> None:
        if self.scales not in ("float32", "ue8m0"):
            raise ValueError(f"Fp8Export() got scales={self.scales!r}; allowed: 'float32', 'ue8m0'")
        if isinstance(self.modules_to_not_convert, str):
            raise ValueError(
                f"Fp8Export() got modules_to_not_convert={self.modules_to_not_convert!r}; "
                "allowed: a tuple of strings"
            )

    def converts(self, name: str, weight: Tensor) -> bool:
        """Return whether a weight is quantized.
        A linear layer's matrix and the matrices of all experts are quantized, unless they are
        excluded.
        """
        module, _, last = name.rpartition(".")
        if weight.dim() == 2:
            return last == "weight" and not self._left_out(module)
        return weight.dim() == 3 and "experts" in module.split(".") and not self._left_out(name)

    def weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the given weights. Those that `converts` accepts are quantized, each followed by
        its scales as `name` + `_scale_inv`.

        It keeps one weight at a time in memory. Call it after weights have the engine's names and
        layout, and after shards are concatenated: blocks are those of the engine's weights. Weights
        that are quantized already, and their scales, are yielded unchanged.

        Args:
            weights: names and tensors as the engine reads them, such as
                "model.layers.0.mlp.gate_proj.weight", [R, C], or all experts' weights [E, R, C].

        Raises:
            ValueError: a name that comes twice, is Megatron's, or belongs to a fused weight that
                engines cut within a block; codes without scales or scales without codes, which is
                known at the end; values that are not finite.
        """
        names: set[str] = set()
        codes: dict[str, Tensor] = {}
        scales: dict[str, Tensor] = {}

        def note(name: str) -> None:
            if name in names:
                raise ValueError(
                    f"{name} is given twice: the engine would keep either; is it mapped twice, or "
                    "is a scale given with a weight that is not quantized yet?"
                )
            names.add(name)

        for name, tensor in weights:
            note(name)
            if tensor.dtype == E4M3 or name.endswith(_SCALE):
                # Only shapes are kept until codes and scales have both come, not tensors.
                is_codes = tensor.dtype == E4M3
                key = name if is_codes else name.removesuffix(_SCALE)
                (codes if is_codes else scales)[key] = tensor.to("meta")
                if key in codes and key in scales:
                    check_scale_shape(key, codes.pop(key), scales.pop(key))
                yield name, tensor
            elif self.converts(name, tensor):
                self._check_layout(name, tensor)
                quantized = quantize_blockwise(
                    tensor, scales=self.scales, dtype=self.dtype, name=name
                )
                note(name + _SCALE)
                yield name, quantized.codes
                yield name + _SCALE, quantized.scale_inv
            else:
                yield name, tensor
        for name in codes:
            raise ValueError(f"{name} is {E4M3} without {name}{_SCALE}: give both, or neither")
        for name in scales:
            raise ValueError(
                f"{name}{_SCALE} is there without {name} in {E4M3}: give both, or neither"
            )

    def quantization_config(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Return the `quantization_config` for the engine's config.json.

        It has the full names of excluded modules, because vLLM compares whole names. Only shapes
        and types are read, so tensors may be on the meta device.
        """
        left_out = {
            name.removesuffix(".weight")
            for name, tensor in weights
            if tensor.dim() > 1
            and tensor.is_floating_point()
            and tensor.dtype != E4M3
            and not name.endswith(_SCALE)
            and not self.converts(name, tensor)
        }
        config = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": sorted(left_out),
        }
        if self.scales == "ue8m0":
            config["scale_fmt"] = "ue8m0"
        return config

    def _left_out(self, module: str) -> bool:
        dotted = f".{module}."
        parts = *NOT_CONVERTED, *self.modules_to_not_convert
        return any(f".{part}." in dotted for part in parts)

    def _check_layout(self, name: str, weight: Tensor) -> None:
        if _MEGATRON.search(name):
            raise ValueError(
                f"{name} is a name of Megatron's, with projections fused as Megatron has them: map "
                "it to the engine's weights first, or name it in modules_to_not_convert"
            )
        last = name.removesuffix(".weight").rpartition(".")[2]
        rows = weight.shape[-2]
        if last in self.pieces:
            check_cuts(name, rows, tuple(self.pieces[last]))
        elif last in _FUSED:
            equal = _FUSED[last]
            if equal is None or rows % equal:
                raise ValueError(
                    f"{name} has {rows} rows of several projections: take it apart first, say in "
                    f"pieces={{{last!r}: (…)}} how many each has, or leave it out with "
                    "modules_to_not_convert"
                )
            check_cuts(name, rows, (rows // equal,) * equal)
