"""Trains low-rank adapters over a frozen base, and compares their gradients with a definition.

The oracle computes with merged weights, made of base and factors as in a merged export. The
gradient of a factor is that of its weight, times the other factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_idempotent.proof.cpu import tiny

from .bench import Bench
from .oracle import Truth
from .parameters import drawn, parts, spread
from .protocol import Calls, Finished, Rows, Wrong
from .tolerances import OF_BFLOAT16

SCALE = 2.0
"""The factors' product is multiplied by this: alpha is twice the rank."""

_LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_BASE, _IN, _OUT = ".to_wrap.weight", ".adapter.linear_in.weight", ".adapter.linear_out.weight"
_MAGNITUDE = ".adapter.weight_magnitude"
_FACTORS = (_IN, _OUT, _MAGNITUDE)
#: Independent roundings move factors' gradients this many times as far as the whole model's:
#: tests/proof/certify/test_oracle.py measures it in bfloat16.
_OFF = 2.7
#: A sum in float32 is rounded at each term, and has as many terms as a wide layer has features:
#: independent roundings come to the root of that number times one rounding.
_SUMS = 16.0


class LowRank(Bench):
    """Runs steps on a model with LoRA or DoRA factors in its linear layers, and checks the factors'
    gradients. `parameters` has the base model's parameters and the factors.

    The base is frozen, and must keep its bits.

    Example: `LowRank(bench, rank=1, magnitudes=False).take(calls)`.
    """

    def __init__(self, host: Bench, *, rank: int, **kinds: bool) -> None:
        """Build a model with low-rank factors of rank `rank` in the layout of `host`, and give it
        to a new adapter of the class of `host.adapter`. `kinds` are further arguments of `add`.
        """
        self._rank, self._kinds = rank, kinds
        self._frozen_factors: tuple[str, ...] = ()
        self._host, self._ratio = host, 1.0
        super().__init__(type(host.adapter)(), host.layout)
        self._base = {n: value for n, value in self.parameters.items() if not n.endswith(_FACTORS)}

    def expect(self, finished: Finished, calls_of: Calls, **options: Any) -> None:
        """Raise `Wrong` if a step differs from its reference in float64, or if a bit of a frozen
        parameter has changed.
        """
        frozen = self._base | {name: self.parameters[name] for name in self.update.frozen}
        super().expect(finished, calls_of, **options)
        moved = [
            name for name, value in frozen.items() if not torch.equal(value, self.parameters[name])
        ]
        if moved:
            raise Wrong(f"the step has moved {moved[0]}, which is frozen")

    def _within(self, error: float, bound: float) -> bool:
        return self._host._within(error, bound)

    def spread_model(self) -> tiny.Tiny:
        """Return the model with low-rank factors of random values, which are put in before DDP
        wraps the model.
        """
        return self.built(before_ddp=self._put)

    def _put(self, module: Any) -> None:
        chunk = SimpleNamespace(module=module)
        spread(chunk, self.layout)
        module.requires_grad_(False)
        put: Any = getattr(self.adapter, "low_rank", add)
        put(module, rank=self._rank, **self._kinds)
        for part in parts(chunk, self.layout):
            if not part.name.endswith(_FACTORS):
                continue
            # Routers must decide by wide margins with adapters, too.
            values = drawn(part, 0.03 if self.layout.experts else 0.1)
            with torch.no_grad():
                if part.name.endswith(_MAGNITUDE):  # which begins as the rows' norm
                    part.value.mul_((1 + values).to(part.value))
                else:
                    part.value.copy_(values)

    def freeze(self, *factors: str) -> None:
        """Freeze the factors of these names, such as "linear_in", in all layers; let all other
        factors train.
        """
        self._frozen_factors = tuple(f".adapter.{factor}.weight" for factor in factors)
        for chunk in self.model.chunks:
            for name, parameter in chunk.module.named_parameters():
                if name.endswith(_FACTORS):
                    parameter.requires_grad_(not name.endswith(self._frozen_factors))
        self.update.frozen = frozenset(
            name for name in self.parameters if name.endswith(self._frozen_factors)
        )

    def tolerance(self, truth: Truth) -> float:
        """Return the largest allowed error of the factors' gradient, relative to its norm."""
        if self.double:
            return super().tolerance(truth) * self._ratio
        if self.half:
            return _OFF * Bench.tolerance(self, truth)
        of_bfloat16 = OF_BFLOAT16[self.layout.loss_kind, self.layout.auxiliary]
        return _OFF * of_bfloat16 * _SUMS * 2.0**-16

    @property
    def _rounded(self) -> dict[str, Tensor]:
        """The base model's parameters and the factors in float64. If the model computes with 16-bit
        values of them, they are rounded to these values first.
        """
        wide = not self.half or self._kinds.get("wide")
        dtype = None if wide else self.subject.config.params_dtype
        return {name: value.to(dtype).double() for name, value in self.parameters.items()}

    @property
    def _computing(self) -> dict[str, Tensor]:
        return merged(self._rounded)

    def _truth(self, everybody: Sequence[Rows]) -> Truth:
        truth = super()._truth(everybody)
        parameters = self._rounded
        trained = [
            n for n in parameters if n.endswith(_FACTORS) and not n.endswith(self._frozen_factors)
        ]
        leaves = {name: parameters[name].requires_grad_() for name in trained}
        weights = merged(parameters)
        adapted = [name for name, value in weights.items() if value.requires_grad]
        gradients = torch.autograd.grad(
            [weights[name] for name in adapted],
            list(leaves.values()),
            [truth.gradient[name] for name in adapted],
        )
        gradient = {name: torch.zeros_like(value) for name, value in parameters.items()}
        gradient |= dict(zip(leaves, gradients, strict=True))
        # A factor's gradient has its weight's error times the other factor, and with DoRA also
        # times magnitude / norm, which is below the root of 2. There are two factors.
        factors = (
            factor.detach() for name, factor in parameters.items() if name.endswith((_IN, _OUT))
        )
        reach = 2 * SCALE * max(float(torch.linalg.matrix_norm(factor, 2)) for factor in factors)
        norm = math.sqrt(sum(float(value.square().sum()) for value in gradient.values()))
        # Momentum holds the errors of earlier steps too.
        self._ratio = max(self._ratio, truth.grad_norm * max(1.0, reach) / norm)
        return dataclasses.replace(truth, gradient=gradient, grad_norm=norm)


def merged(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge low-rank factors into the base: return the weights of an equivalent model without
    factors.

    With DoRA a row's norm is its magnitude; the gradient takes the row's own norm as a constant.
    """
    weights = {}
    for name, value in parameters.items():
        layer = name.removesuffix(_BASE)
        if layer != name and layer + _IN in parameters:
            value = value + SCALE * parameters[layer + _OUT] @ parameters[layer + _IN]
            if (magnitude := parameters.get(layer + _MAGNITUDE)) is not None:
                value = value * (magnitude / value.norm(dim=1).detach())[:, None]
        if not name.endswith(_FACTORS):
            weights[name.replace(".to_wrap.", ".")] = value
    return weights


def add(module: Any, *, rank: int, magnitudes: bool = False, wide: bool = False) -> None:
    """Replace the linear layers of a chunk's module by ones with low-rank factors (`Adapted`), in
    place. Call it before DDP wraps the module.

    `magnitudes` adds those of DoRA; `wide` makes factors of 32 bits over a base of 16. Experts that
    several ranks share get no adapter.
    """
    for name, layer in list(module.named_modules()):
        parent, _, attribute = name.rpartition(".")
        if attribute in _LAYERS and not (layer.is_expert and _sharing(layer) > 1):
            setattr(module.get_submodule(parent), attribute, Adapted(layer, rank, magnitudes, wide))


def _factor(
    shape: tuple[int, int], base: Any, dimension: int | None, dtype: torch.dtype
) -> nn.Linear:
    """Return a low-rank factor as a linear layer whose weight has `shape` on this rank. The weight
    is marked as sharded along `dimension` over tensor-parallel ranks, or as replicated if that is
    None.
    """
    # If both factors were zero, so would be both gradients, and no step would move them. The values
    # are drawn from no generator, so all replicas have the same.
    number = torch.arange(shape[0] * shape[1], device=base.weight.device, dtype=torch.float32)
    values = (0.02 * (number + 1).sin()).reshape(shape).to(dtype)
    factor = nn.Linear(shape[1], shape[0], bias=False, device="meta")
    factor.weight = mark(nn.Parameter(values), base, dimension)
    return factor


class _Adapter(nn.Module):
    def __init__(self, linear_in: nn.Linear, linear_out: nn.Linear) -> None:
        super().__init__()
        self.linear_in, self.linear_out = linear_in, linear_out

    def forward(self) -> Tensor | None:
        """Return DoRA's magnitudes, or None for LoRA. `Adapted.forward` calls this module instead
        of reading the attribute: the call runs DDP's forward pre-hook, which sees that the updated
        magnitudes are gathered.
        """
        return getattr(self, "weight_magnitude", None)


class Adapted(nn.Module):
    """Wraps a tensor-parallel linear layer, and adds two low-rank factors to it: one is sharded as
    the layer's weight, the other is replicated.
    """

    def __init__(self, base: Any, rank: int, magnitudes: bool, wide: bool) -> None:
        super().__init__()
        dtype = torch.float32 if wide else base.weight.dtype
        self.to_wrap = base
        self.column = "Column" in type(base).__name__
        self.scale = SCALE
        outputs, inputs = base.weight.shape
        cuts = (None, 0, 0) if self.column else (1, None, None)
        self.adapter = _Adapter(
            _factor((rank, inputs), base, cuts[0], dtype),
            _factor((outputs, rank), base, cuts[1], dtype),
        )
        if magnitudes:
            norm = nn.Parameter(self._norm().clone())
            self.adapter.weight_magnitude = mark(norm, base, cuts[2])

    @torch.no_grad()
    def _norm(self) -> Tensor:
        from megatron.core import parallel_state

        base: Any = self.to_wrap
        adapter: Any = self.adapter
        product = self.scale * adapter.linear_out.weight @ adapter.linear_in.weight
        squares = (base.weight + product).square().sum(1)
        if not self.column and _sharing(base) > 1:
            group = parallel_state.get_tensor_model_parallel_group()
            torch.distributed.all_reduce(squares, group=group)
        norm: Tensor = squares.sqrt()
        return norm

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.tensor_parallel import mappings as m

        base: Any = self.to_wrap
        adapter: Any = self.adapter
        output, bias = base(x, *args, **kwargs)
        low = adapter.linear_in(x.to(adapter.linear_in.weight.dtype))
        if _sharing(base) > 1:
            if self.column and base.sequence_parallel:
                low = m.gather_from_sequence_parallel_region(low)
            elif self.column:
                low = m.copy_to_tensor_model_parallel_region(low)
            elif base.sequence_parallel:
                low = m.reduce_scatter_to_sequence_parallel_region(low)
            else:
                low = m.reduce_from_tensor_model_parallel_region(low)
        output = output + (self.scale * adapter.linear_out(low)).to(output.dtype)
        if (magnitude := adapter()) is not None:
            inside = 0.0 if bias is not None or base.bias is None else base.bias
            output = (output - inside) * (magnitude / self._norm()) + inside
        return output, bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the sharded state of the wrapped layer and of its factors, for a distributed
        checkpoint.
        """
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        base, adapter = (f"{prefix}{name}." for name in ("to_wrap", "adapter"))
        factors = self.adapter.state_dict(keep_vars=True)
        cut = {n: f.partition_dim for n, f in factors.items() if hasattr(f, "partition_dim")}
        state: dict[str, Any] = self.to_wrap.sharded_state_dict(base, sharded_offsets, metadata)
        state |= make_sharded_tensors_for_checkpoint(factors, adapter, cut, sharded_offsets)
        return state


def _sharing(base: Any) -> int:
    """Return the number of tensor-parallel ranks that a layer's weight is split over."""
    from megatron.core import parallel_state as ps

    if base.is_expert:
        return int(ps.get_expert_tensor_parallel_world_size())
    return int(ps.get_tensor_model_parallel_world_size())


def mark(parameter: Any, base: Any, dimension: int | None) -> Any:
    """Set the attributes that tell Megatron how tensor-parallel ranks hold a factor: as shards
    along `dimension`, or as copies if `dimension` is None. Return the factor.

    Sequence-parallel ranks compute a copy's gradient of their own positions; finalizing sums it.
    """
    parameter.allreduce = getattr(base.weight, "allreduce", True)
    if dimension is not None:
        parameter.tensor_model_parallel = _sharing(base) > 1
        parameter.partition_dim, parameter.partition_stride = dimension, 1
    elif base.sequence_parallel and not base.is_expert:
        parameter.sequence_parallel = True
    return parameter
