"""Exports the weights of a transformers model under FSDP2, named as in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_idempotent.rl.weights.records import TensorInfo

from .buckets import BucketStream

#: Segments that wrappers insert into parameter names.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


class FSDPWeights:
    """Implements `WeightSource` for a transformers model that is sharded by `fully_shard`.

    All ranks gather one parameter at a time, and rank 0 keeps it; other ranks need memory for one
    unsharded parameter. The experts of a Qwen3-MoE layer, which transformers keeps in one tensor,
    are split as in its checkpoints: `mlp.experts.3.gate_proj.weight`. Tied weights are sent once.

    Do not iterate between `microbatch()` and `finish()` of a split step, except in its `reading()`.

    Example:
        source = FSDPWeights(model, dtype=torch.bfloat16)
    """

    def __init__(self, model: Any, *, dtype: torch.dtype | None = None) -> None:
        """
        Args:
            model: the root module, on the same mesh on all ranks.
            dtype: the dtype that shards are cast to before the gather; None for the parameters'
                dtypes.

        Raises:
            ValueError: a parameter has no known counterpart in checkpoints, or `dtype` is not a
                floating-point type.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"FSDPWeights() got dtype={dtype}; allowed: floating point")
        self._model, self._dtype = model, dtype
        self._outputs = [_outputs(n, p, dtype) for n, p in _parameters(model).items()]

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Return all tensors in the order of the model's parameters, without communication."""
        return tuple(info for infos in self._outputs for info in infos)

    def buckets(self, *, bucket_bytes: int) -> BucketStream:
        """Return a stream of the weights, which reads the parameters as it yields buckets.

        A collective: all ranks call it, and take all buckets or close the stream.

        Raises:
            ValueError: `bucket_bytes` is not a positive int.
        """
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a forward, parameters may be unsharded and stale
        return BucketStream(
            [(info,) for info in self.tensors()],
            self._fetch,
            sources=[n for n, infos in enumerate(self._outputs) for _ in infos],
            bucket_bytes=bucket_bytes,
            convert=iter,  # lazily, since one parameter has all experts of a layer
            rank=dist.get_rank() if dist.is_initialized() else 0,
        )

    def _fetch(self, members: Sequence[int]) -> Mapping[str, torch.Tensor]:
        parameters = list(_parameters(self._model).values())
        tensors: dict[str, torch.Tensor] = {}
        for member in members:
            shard = parameters[member].detach()
            shard = shard if self._dtype is None else shard.to(self._dtype)
            tensor = shard.full_tensor() if isinstance(shard, DTensor) else shard
            local = shard.to_local() if isinstance(shard, DTensor) else shard
            if _is_first():
                # On one rank the tensor is the parameter itself, which the next step changes.
                tensor = tensor.clone() if tensor.data_ptr() == local.data_ptr() else tensor
                tensors |= _cut(tensor, self._outputs[member])
        return tensors


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    parameters = {}
    for name, parameter in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        parameters[name] = parameter
    return parameters


def _outputs(
    name: str, parameter: torch.nn.Parameter, dtype: torch.dtype | None
) -> tuple[TensorInfo, ...]:
    shape, dtype = tuple(parameter.shape), dtype or parameter.dtype
    if len(shape) < 3:
        return (TensorInfo(name=name, shape=shape, dtype=dtype),)
    prefix = name.rpartition(".")[0]
    if not name.endswith((_GATE_UP, _DOWN)):
        raise ValueError(
            f"{name} has shape {list(shape)}, and its name in checkpoints is not known: of "
            f"parameters with three dimensions only {_GATE_UP} and {_DOWN} are"
        )
    projections = ("gate_proj", "up_proj") if name.endswith(_GATE_UP) else ("down_proj",)
    experts, rows, columns = shape
    expert_shape = (rows // len(projections), columns)
    return tuple(
        TensorInfo(name=f"{prefix}.{expert}.{projection}.weight", shape=expert_shape, dtype=dtype)
        for expert in range(experts)
        for projection in projections
    )


def _cut(tensor: torch.Tensor, infos: tuple[TensorInfo, ...]) -> dict[str, torch.Tensor]:
    if len(infos) == 1:
        return {infos[0].name: tensor.reshape(infos[0].shape)}
    rows, columns = infos[0].shape
    pieces = tensor.reshape(-1, rows, columns).unbind()
    return {info.name: piece for info, piece in zip(infos, pieces, strict=True)}
