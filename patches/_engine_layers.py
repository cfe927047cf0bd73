"""Builds Megatron's layers over Transformer Engine without an installed Transformer Engine.

Megatron's `TEColumnParallelGroupedLinear`, `TERowParallelGroupedLinear` and `TELinear` are the
release's own code, over stand-ins for the classes of Transformer Engine that they extend. The
stand-ins create parameters, mark them as Transformer Engine does since 2.13, and compute nothing.
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
    """Replace the experts of each MoE layer in `module` by two Transformer Engine grouped layers.
    The layers are of the classes in `TEGroupedMLP`, built on stand-ins for Transformer Engine. The
    experts then have no forward.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from torch import nn

    for layer in [part for part in module.modules() if isinstance(part, MoELayer)]:
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
            column, row, _ = _layers()
            layer.experts.linear_fc1 = column(count, config.hidden_size, width, **options)
            layer.experts.linear_fc2 = row(count, width, config.hidden_size, **options)
        layer.experts.cuda()


def duplicated(config: Any, width: int) -> Any:
    """Return a `TELinear` with weight [H, width], of which each tensor-parallel rank has a copy.
    MLA uses such layers.
    """
    with _version("2.16.1"):
        _, _, linear = _layers()
        return linear(
            config.hidden_size,
            width,
            parallel_mode="duplicated",
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_bias_add=False,
            skip_weight_param_allocation=False,
        ).cuda()


@functools.cache
def _layers() -> tuple[Any, Any, Any]:
    """Return Megatron's column- and row-parallel grouped layers, and its `TELinear`, as classes.

    They come from a second copy of the module, so that the rest of Megatron still runs without
    Transformer Engine.
    """
    with _standins.replaced(_ENGINE):
        pytorch: Any = importlib.import_module(f"{_ENGINE}.pytorch")
        pytorch.GroupedLinear, pytorch.Linear = _grouped_linear(), _linear()
        spec: Any = importlib.util.find_spec(_LAYERS)
        layers = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(layers)
    grouped = (layers.TEColumnParallelGroupedLinear, layers.TERowParallelGroupedLinear)
    return *grouped, layers.TELinear


@contextlib.contextmanager
def _version(text: str) -> Iterator[None]:
    """Let Megatron believe, during the block, that Transformer Engine has the version `text`."""
    from megatron.core import utils
    from packaging.version import Version

    module: Any = utils
    saved, module._te_version = module._te_version, Version(text)
    try:
        yield
    finally:
        module._te_version = saved


def _grouped_linear() -> Any:
    import torch
    from torch import nn

    class GroupedLinear(nn.Module):
        """Stands in for Transformer Engine's `GroupedLinear`: only creates its parameters."""

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


def _linear() -> Any:
    import torch
    from torch import nn

    class Linear(nn.Module):
        """Stands in for Transformer Engine's `Linear`: only creates a weight, marked as a
        tensor-parallel shard.
        """

        def __init__(
            self,
            in_features: int,
            out_features: int,
            *,
            parallel_mode: str | None,
            tp_size: int,
            params_dtype: Any,
            **_: Any,
        ) -> None:
            super().__init__()
            self.parallel_mode, self.tp_size = parallel_mode, tp_size
            weight = torch.zeros(out_features, in_features, dtype=params_dtype)
            self.weight = nn.Parameter(weight)
            marked: Any = self.weight
            marked.tensor_model_parallel = True
            marked.partition_dim = 1 if parallel_mode == "row" else 0
            marked.partition_stride = 1

    return Linear
