"""Builds experts of Megatron's own grouped layers where Transformer Engine is not installed.

Megatron's `TEColumnParallelGroupedLinear` and `TERowParallelGroupedLinear` are the release's own
code, over a stand-in for the class of Transformer Engine that they extend. It makes parameters and
leaves them without marks, as Transformer Engine does since 2.13, and computes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from .frameworks import _standins

_ENGINE, _LAYERS = "transformer_engine", "megatron.core.extensions.transformer_engine"


def group_experts(module: Any) -> None:
    """Replace the experts of each MoE layer by two grouped layers, as `TEGroupedMLP` holds them.

    No forward runs over them.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from torch import nn

    for layer in [each for each in module.modules() if isinstance(each, MoELayer)]:
        config, count = layer.config, len(layer.experts.local_experts)
        width = config.moe_ffn_hidden_size or config.ffn_hidden_size
        options = {
            "config": config,
            "init_method": config.init_method,
            "bias": config.add_bias_linear,
            "skip_bias_add": True,
            "is_expert": True,
        }
        layer.experts = nn.Module()
        with _version("2.16.1"):
            column, row = _layers()
            layer.experts.linear_fc1 = column(count, config.hidden_size, width, **options)
            layer.experts.linear_fc2 = row(count, width, config.hidden_size, **options)
        layer.experts.cuda()


@functools.cache
def _layers() -> tuple[Any, Any]:
    """Return Megatron's classes of grouped layers, column-parallel and row-parallel.

    They are from a second copy of the module, so that the rest of Megatron goes on without
    Transformer Engine.
    """
    with _standins.replaced(_ENGINE):
        pytorch: Any = importlib.import_module(f"{_ENGINE}.pytorch")
        pytorch.GroupedLinear = _grouped_linear()
        spec: Any = importlib.util.find_spec(_LAYERS)
        layers = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(layers)
    return layers.TEColumnParallelGroupedLinear, layers.TERowParallelGroupedLinear


@contextlib.contextmanager
def _version(text: str) -> Iterator[None]:
    """Have Megatron find this version of Transformer Engine inside of a block."""
    from megatron.core import utils
    from packaging.version import Version

    known: Any = utils
    kept, known._te_version = known._te_version, Version(text)
    try:
        yield
    finally:
        known._te_version = kept


def _grouped_linear() -> Any:
    import torch
    from torch import nn

    class GroupedLinear(nn.Module):
        """Makes the parameters of Transformer Engine's layer of this name."""

        def __init__(
            self,
            num_gemms: int,
            in_features: int,
            out_features: int,
            *,
            bias: bool,
            parallel_mode: str | None,
            tp_size: int,
            params_dtype: Any,
            **_: Any,
        ) -> None:
            super().__init__()
            if parallel_mode == "column":
                out_features //= tp_size
            elif parallel_mode == "row":
                in_features //= tp_size
            for index in range(num_gemms):
                weight = torch.zeros(out_features, in_features, dtype=params_dtype)
                self.register_parameter(f"weight{index}", nn.Parameter(weight))
                if bias:
                    zeros = torch.zeros(out_features, dtype=params_dtype)
                    self.register_parameter(f"bias{index}", nn.Parameter(zeros))

    return GroupedLinear
