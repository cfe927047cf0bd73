"""Names a rank's parameters as in the whole model, and joins shards to whole parameters.

In half precision the values are those that Megatron's optimizers keep in float32. Exports of any
format are compared with them.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_idempotent.megatron import optimizers
from megatron_idempotent.megatron.ddp import innermost

from . import oracle
from .layouts import EXPERTS, Layout
from .protocol import Wrong

_EMBEDDING = "embedding.word_embeddings.weight"
LOSS_SCALE = 256.0
"""Multiplies losses in float16, whose least number is 2^-24 and whose largest is 65504.

Sums over the tokens of a microbatch stay below that, and few gradients of a token are so small."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Main:
    """Holds a rank's part of a float32 main parameter: all of it, or a shard with the distributed
    optimizer.
    """

    start: int
    """The index in the parameter of the part's first element."""
    values: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterPart:
    """Describes one parameter of this rank: its name in the whole model, and this rank's shard of
    it.
    """

    name: str
    dimension: int | None
    """The dimension that ranks share; None if each has all of it."""
    rank: int
    size: int
    value: Tensor
    main: Main | None = None
    """This rank's part of the main parameter in float32; None if the parameter has none."""

    @property
    def whole_shape(self) -> list[int]:
        """The shape of the whole parameter, of which this rank has a shard or all."""
        shape = list(self.value.shape)
        if self.dimension is not None:
            shape[self.dimension] *= self.size
        return shape

    def shard_of(self, tensor: Tensor) -> Tensor:
        """Return this rank's shard of a tensor with the shape of the whole parameter."""
        if self.dimension is None:
            return tensor
        return tensor.chunk(self.size, self.dimension)[self.rank]


def parts(chunk: Any, layout: Layout) -> Iterator[ParameterPart]:
    """Yield a `ParameterPart` for each parameter of a model chunk, named as in an unsharded model.

    An output layer that shares the embedding's weight has the embedding's name.
    """
    from megatron.core import parallel_state as ps

    dense = ps.get_tensor_model_parallel_rank(), layout.sizes["tp"]
    routed = dense
    if layout.experts:
        routed = ps.get_expert_tensor_parallel_rank(), layout.sizes["etp"]
    module = innermost(chunk)
    for name, parameter in module.named_parameters():
        words = numbered(module, name).split(".")
        rank, size = dense
        if "local_experts" in words:
            rank, size = routed
            index = words.index("local_experts") + 1
            local = EXPERTS // layout.sizes["ep"]
            words[index] = str(int(words[index]) + local * ps.get_expert_model_parallel_rank())
        # The name in releases before 0.17.
        full_name = ".".join(words).replace("mtp_model_layer", oracle.INNER)
        if full_name == "output_layer.weight" and "tied" in layout.flags:
            if getattr(module, "mtp_process", False):
                continue  # nobody reads it: the stage has the embedding too, for the MTP layer
            full_name = _EMBEDDING
        sharded = getattr(parameter, "tensor_model_parallel", False) and size > 1
        yield ParameterPart(
            name=full_name,
            dimension=parameter.partition_dim if sharded else None,
            rank=rank if sharded else 0,
            size=size if sharded else 1,
            value=parameter,
        )


def numbered(module: Any, name: str) -> str:
    """Return the name of a parameter or buffer with its layer's number in the whole model, instead
    of the layer's number within this pipeline stage.
    """
    words = name.split(".")
    if words[:2] == ["decoder", "layers"]:
        words[2] = str(module.decoder.layers[int(words[2])].layer_number - 1)
    return ".".join(words)


def spread(chunk: Any, layout: Layout) -> None:
    """Add fixed noise to a chunk's weights, in place, so that a fault in any of them shows. Ranks
    with copies of a weight add the same noise.

    Biases, norms and experts differ from each other then, and routers decide by wide margins.
    """
    for part in parts(chunk, layout):
        size = 0.02 if "local_experts" in part.name else 0.1 if part.value.dim() == 1 else 0.0
        added = drawn(part, size)
        if layout.experts:
            added += part.shard_of(oracle.decided(part.name, part.whole_shape))
        with torch.no_grad():
            part.value.add_(added.to(part.value))


def drawn(part: ParameterPart, size: float) -> Tensor:
    """Return this rank's shard of a random normal tensor times `size`, with a seed from the
    parameter's name. Ranks with copies of the parameter get equal values.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(part.name.encode()))
    normal = torch.randn(part.whole_shape, generator=generator, dtype=torch.float64)
    return part.shard_of(size * normal)


def joined(shards: Sequence[ParameterPart]) -> Tensor:
    """Concatenate the shards of one parameter, one of each tensor-parallel rank, and return the
    whole tensor.

    Raises:
        Wrong: one is missing.
    """
    ordered = sorted(shards, key=lambda part: part.rank)
    if len(ordered) != ordered[0].size:
        raise Wrong(f"{ordered[0].name} has {len(ordered)} of its {ordered[0].size} shards")
    if ordered[0].dimension is None:
        return ordered[0].value
    return torch.cat([part.value for part in ordered], ordered[0].dimension)


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the torch optimizers inside a Megatron optimizer, or a bare torch optimizer in a list.
    A Megatron optimizer without parameters has none.
    """
    inner = (getattr(outer, "optimizer", outer) for outer in optimizers.unchained(optimizer))
    return [optimizer_of_torch for optimizer_of_torch in inner if optimizer_of_torch is not None]


def updated_by(inner: Any) -> list[Any]:
    """Return the parameters that a torch optimizer updates, in order."""
    return [parameter for group in inner.param_groups for parameter in group["params"]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Holds the optimizer state that this rank has for one model parameter, or for its shard."""

    parameter: Any
    """The model's."""
    start: int
    """The index in the parameter of the first element with state."""
    tensors: Mapping[str, Tensor]
    """The tensor that is stepped, "main", and its moments by torch's names."""
    steps: float
    """The steps taken; 0 if the optimizer does not count them by parameter."""


def kept_by(optimizer: Any) -> Iterator[Kept]:
    """Yield this rank's optimizer state of each parameter that its optimizer updates, without
    copies.
    """
    for outer in optimizers.unchained(optimizer):
        for parameter, main in optimizers.stepped(outer):
            state = outer.optimizer.state.get(main, {})
            moments = {n: v for n, v in state.items() if isinstance(v, Tensor) and v.dim()}
            yield Kept(
                parameter=parameter,
                start=optimizers.start_in(outer, parameter),
                tensors={"main": main, **moments},
                steps=float(state.get("step", 0)),
            )


def mains_of(optimizer: Any) -> dict[Any, Main]:
    """Copy this rank's main parameters to the CPU; return them by model parameter. Float32
    parameters have none.
    """
    return {
        state.parameter: Main(
            start=state.start, values=state.tensors["main"].detach().to("cpu", copy=True).flatten()
        )
        for state in kept_by(optimizer)
        if state.parameter.dtype != torch.float32
    }


def copied_for_adam(optimizer: Any) -> list[Kept]:
    """Copy this rank's main parameters and Adam moments to float64; moments that the optimizer does
    not have yet are zeros.
    """
    copies = []
    for state in kept_by(optimizer):
        zeros = torch.zeros_like(state.tensors["main"])
        tensors = {
            name: state.tensors.get(name, zeros).detach().double()
            for name in ("main", "exp_avg", "exp_avg_sq")
        }
        copies.append(dataclasses.replace(state, tensors=tensors))
    return copies


def not_of_adam(
    previous: Kept,
    current: Kept,
    name: str,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> str | None:
    """Return in words how a parameter's update differs from every possible Adam step in float32;
    None if it is one.

    The gradient is solved for from the first moments. Adam's sums of products are off by as many
    roundings as they have terms, this gradient by twice as many, and its square by four times as
    many. A frozen parameter keeps its value and its moments. `name` is the parameter's.
    """
    main_before, first_before, second_before = previous.tensors.values()
    main, first, second = current.tensors.values()
    pairs = ((main_before, main), (first_before, first), (second_before, second))
    if all(torch.equal(old, new) for old, new in pairs):
        return None
    rounding = 2.0**-24
    gradient = (first - beta1 * first_before) / (1 - beta1)
    right_second = beta2 * second_before + (1 - beta2) * gradient.square()
    sizes = second_before + (gradient.abs() + first_before.abs()).square()
    faults = {"second moment": (second, right_second, 16 * rounding * sizes + 2.0**-126)}
    if current.steps:
        root = (second / (1 - beta2**current.steps)).sqrt() + epsilon
        move = lr * first / (1 - beta1**current.steps) / root
        bound = 2 * rounding * (main_before.abs() + main.abs()) + 16 * rounding * move.abs()
        faults["main value"] = main, main_before - move, bound
    for kind, (value, right, bound) in faults.items():
        off = (value - right).abs()
        if not bool((off <= bound).all()):
            return (
                f"the {kind} of {name} after the step is off by {float(off.max()):.3g}, "
                f"and Adam's roundings in float32 come to {float(bound.max()):.3g}: what the "
                "optimizer keeps has 32 bits, also where parameters have fewer"
            )
    return None


def joined_main(name: str, rounded: Tensor, parts: Sequence[Main]) -> Tensor:
    """Join the ranks' parts of a float32 main parameter, and return it in the shape of `rounded`,
    the model's parameter in 16 bits.

    Raises:
        Wrong: a part is missing, two ranks have other bits, or the model has other values.
    """
    main_N = torch.empty(rounded.numel(), dtype=torch.float32)
    is_filled_N = torch.zeros(rounded.numel(), dtype=torch.bool)
    for part in parts:
        span = slice(part.start, part.start + len(part.values))
        overlap = is_filled_N[span]
        if not torch.equal(main_N[span][overlap], part.values[overlap]):
            raise Wrong(f"ranks have other bits in the main parameter of {name}")
        main_N[span], is_filled_N[span] = part.values, True
    if not is_filled_N.all():
        missing = int((~is_filled_N).sum())
        raise Wrong(f"no rank has {missing} elements of the main parameter of {name}")
    main = main_N.view_as(rounded)
    if not torch.equal(main.to(rounded.dtype), rounded):
        raise Wrong(f"{name} is not its main parameter, rounded")
    return main


def compared(
    exported: Any, own_parts: Sequence[ParameterPart], model: Mapping[str, Tensor]
) -> tuple[set[str], str | None]:
    """Compare the tensors that a rank exported with the model's parameters. Return the exported
    parameters' names, and the difference in words, or None if there is none.

    Exported tensors may be the rank's own parameters in their order, or whole ones, or have names.
    If names and shapes are not Megatron's, the export must contain all numbers of the rank's
    parameters, or of the whole model's.
    """
    tensors = list(_tensors(exported, ""))
    if not tensors:
        return set(), None
    shard = {part.name: part.value for part in own_parts}
    shapes = [tensor.shape for _, tensor in tensors]
    for right in (shard, model):
        if [value.shape for value in right.values()] == shapes:
            pairs = zip(tensors, right.items(), strict=True)
            wrong = [name for (_, has), (name, is_) in pairs if not _same(has, is_)]
            return set(right), _in_words(wrong)
    if all(name in model for name, _ in tensors):
        wrong = []
        for name, has in tensors:
            rights = [values[name] for values in (shard, model) if name in values]
            if not any(has.shape == value.shape and _same(has, value) for value in rights):
                wrong.append(name)
        return {name for name, _ in tensors}, _in_words(wrong)
    dtype = tensors[0][1].dtype
    numbers = _numbers([tensor for _, tensor in tensors], dtype)
    for right in (model, shard):
        if bool(torch.isin(_numbers([*right.values()], dtype), numbers).all()):
            return set(right), None
    return set(shard), "the numbers of the model's parameters are not among them"


def _tensors(exported: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(exported, Tensor):
        if exported.is_floating_point():
            yield name, exported.detach().cpu()
    elif isinstance(exported, Mapping):
        for key, value in exported.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(exported, tuple) and len(exported) == 2 and isinstance(exported[0], str):
        yield from _tensors(exported[1], exported[0])
    elif isinstance(exported, (Sequence, Iterator)) and not isinstance(exported, (str, bytes)):
        for value in exported:
            yield from _tensors(value, name)


def _same(has: Tensor, right: Tensor) -> bool:
    """Return whether exported values equal the right values, converted to the export's type."""
    return torch.equal(has, right.detach().cpu().to(has.dtype))


def _numbers(values: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([value.detach().cpu().to(dtype).flatten() for value in values])


def _in_words(wrong: Sequence[str]) -> str | None:
    return f"{len(wrong)} tensors differ, the first is {wrong[0]}" if wrong else None
