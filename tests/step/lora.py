"""Adapters and frozen weights, as a framework puts them into a model before DDP wraps it.

An adapter adds B(A(x)) to the output of a parallel linear layer. Legend: T positions, B rows,
R rank of the adapter, I inputs and O outputs of the layer, both of the whole layer.

Under tensor parallelism one of A and B is cut as the layer's weight is, and the other one is the
same on all ranks. Under sequence parallelism the latter sees a part of the positions only, and is
marked so that finalizing adds its gradient up over the ranks.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn

R = 4


class Adapter(nn.Module):
    """Two small matrices beside a column- or row-parallel layer."""

    def __init__(self, base: Any, name: str, rank: int, *, expert: bool) -> None:
        super().__init__()
        from megatron.core import parallel_state as ps

        self.column = "Column" in type(base).__name__
        part, parts = (
            ps.get_tensor_model_parallel_rank(),
            ps.get_tensor_model_parallel_world_size(),
        )
        if expert:
            if base.config.expert_tensor_parallel_size != 1:
                raise ValueError("adapters of experts that several ranks share are not built here")
            part, parts = 0, 1
        self.parts = parts
        self.sequence = bool(base.config.sequence_parallel) and parts > 1
        outputs, inputs = base.weight.shape
        whole = (outputs * parts, inputs) if self.column else (outputs, inputs * parts)
        self.a = _weight(f"{name}.a", (rank, whole[1]), base.weight, expert=expert)
        self.b = _weight(f"{name}.b", (whole[0], rank), base.weight, expert=expert)
        cut, kept, dimension = (self.b, self.a, 0) if self.column else (self.a, self.b, 1)
        cut.data = cut.data.chunk(parts, dimension)[part].contiguous()
        cut.tensor_model_parallel = parts > 1
        cut.partition_dim, cut.partition_stride = dimension, 1
        if self.sequence:
            kept.sequence_parallel = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import mappings as m

        low = nn.functional.linear(x, self.a)
        if self.parts > 1:
            if self.column and self.sequence:
                low = m.gather_from_sequence_parallel_region(low)
            elif self.column:
                low = m.copy_to_tensor_model_parallel_region(low)
            elif self.sequence:
                low = m.reduce_scatter_to_sequence_parallel_region(low)
            else:
                low = m.reduce_from_tensor_model_parallel_region(low)
        return nn.functional.linear(low, self.b)


class WithAdapters(nn.Module):
    """A parallel linear layer with adapters beside it, of which `active` ones are used."""

    def __init__(
        self, base: Any, name: str, adapters: tuple[str, ...], *, expert: bool, alike: bool
    ) -> None:
        super().__init__()
        self.base = base
        self.adapters = nn.ModuleDict(
            {
                each: Adapter(base, f"{name}.{each}", R if alike else R + index, expert=expert)
                for index, each in enumerate(adapters)
            }
        )
        self.active: tuple[str, ...] = adapters

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, bias = self.base(x, *args, **kwargs)
        for each in self.active:
            output = output + self.adapters[each](x)
        return output, bias


def _weight(name: str, shape: tuple[int, ...], like: torch.Tensor, *, expert: bool) -> Any:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    value = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.1
    weight = nn.Parameter(value.to(like.dtype))
    weight.allreduce = not expert
    return weight


class Lora:
    """Called with a chunk's module: freezes all of it, then adds adapters.

    Args:
        targets: ends of names of the layers that get adapters.
        layers: numbers of the layers, from 1 on, that do; all, if None.
        adapters: names of the adapters that each gets.
        trained: parts of names of parameters that stay trainable besides them.
        alike: whether all adapters have the same rank.
    """

    def __init__(
        self,
        targets: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        layers: tuple[int, ...] | None = None,
        adapters: tuple[str, ...] = ("first",),
        trained: tuple[str, ...] = (),
        alike: bool = False,
    ) -> None:
        self.targets, self.layers = targets, layers
        self.adapters, self.trained = adapters, trained
        self.alike = alike

    def __call__(self, module: Any) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(any(part in name for part in self.trained))
        for layer in _layers(module):
            number = layer.layer_number
            if self.layers is not None and number not in self.layers:
                continue
            for path, found in list(layer.named_modules()):
                if path.endswith(self.targets) and hasattr(found, "weight"):
                    parent = layer.get_submodule(path.rpartition(".")[0])
                    wrapped = WithAdapters(
                        found,
                        f"{number}.{path}",
                        self.adapters,
                        expert="local_experts" in path,
                        alike=self.alike,
                    )
                    setattr(parent, path.rpartition(".")[2], wrapped)


def _layers(module: Any) -> Any:
    module = getattr(module, "module", module)  # Float16Module
    return module.decoder.layers


def use(chunks: Any, *names: str) -> None:
    """Let these adapters take part in the forwards that follow, and no others."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, WithAdapters):
                module.active = names
