"""Bounds how far rounding may move a model's gradient, to first order, at its weights and tokens.

Legend: N tokens, I features that go into a layer, O that come out of it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "proof" / "cpu"))

#: Operations on single elements between two layers: a bias, two residuals, the mask of a dropout,
#: and an activation or its derivative, which is a product of four and a polynomial.
BETWEEN = 16
#: What an iteration finds more than the one before is next to nothing after so many.
ITERATIONS = 8
#: Of the difference that stands for a derivative; of float64.
STEP = 1e-9
_EVERY: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}


def roundings(
    model: nn.Module,
    total: Callable[[], Tensor],
    *,
    terms: int,
    parts: int,
    between: int = BETWEEN,
) -> float:
    """Bounds what two ways of one gradient differ by: so many roundings of its norm.

    Each layer's output is off by local roundings: as many as its sums have terms, and a few, of
    the same sums with all terms positive (`_Layer.off`). So is the gradient of its input. Both move
    the gradient of the parameters by their derivative J, through all layers between. D has how much
    each of n results may be off. The largest singular value s of J·D is measured in float64: it is
    found by iteration, with one derivative of a gradient and one difference of two gradients in
    each. So a gradient is off by no more than s·√n, and by its own sums over tokens; two ways
    differ by both their errors. This is what could happen at worst, where all roundings conspire.

    Args:
        model: in float64 on one rank, with all of its layers.
        total: runs it and makes the loss of all sequences, by functions that can be differentiated
            twice.
        terms: roundings of the logits' gradient, of the loss that is bounded.
        parts: how many gradients are added up, of microbatches, calls and ranks.
        between: roundings of what is computed between two layers, of an element.
    """
    layers = _Gradients(model, total, between)
    own = layers.measure(terms, parts)
    return 2 * (_largest(layers) + own) / layers.size


def output_roundings(model: nn.Module, output: Callable[[], Tensor], *, terms: int) -> float:
    """The same of outputs and not of gradients: the norm of the difference, in roundings of 1.

    `terms` are the roundings of the output itself, after the last layer.
    """
    layers = _Outputs(model, output, BETWEEN)
    own = layers.measure(terms, 0)
    return 2 * (_largest(layers) + own)


def _largest(layers: _Layers) -> float:
    """Return s·√n."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(layers.elements(), generator=generator, dtype=torch.float64)
    found: list[float] = []
    for _ in range(ITERATIONS):
        vector = vector / vector.norm()
        moved = layers.towards(vector)
        found.append(float(moved.norm()))
        back = layers.back(moved)
        # Both are of one matrix, or something cannot be differentiated twice.
        assert abs(float(back @ vector) - found[-1] ** 2) < 1e-3 * found[-1] ** 2, found
        vector = back
    assert found[-1] < 1.05 * found[-2], found
    largest = found[-1] * found[-1] / found[-2]
    return largest * sum(scale > 0 for scale in layers.scales) ** 0.5


class _Off(NamedTuple):
    """Norms of what the results of a layer are off by, in roundings."""

    output: float
    of_inputs: list[float]
    """The roundings of the gradients of its inputs."""
    of_own: float = 0.0
    """The roundings of the gradients of its own parameters."""


class _Layer(NamedTuple):
    """One call of a layer, and where its inputs and its output are among the points."""

    module: Any
    inputs: list[Tensor]
    packed: Any
    places: list[int]
    place: int

    def off(self, output: Tensor, given: Tensor, of_inputs: list[Tensor], parts: int) -> _Off:
        """Count roundings, by the kind of the layer; `given` is the output's gradient."""
        if hasattr(self.module, "softmax_scale"):
            return self._attention(given)
        weight, kind = self.module.weight.detach(), type(self.module).__name__
        if "Embedding" in kind:
            # Rows are copied; the gradients of each are added up.
            rows_NO = given.abs().reshape(-1, given.shape[-1])
            added = torch.zeros_like(weight).index_add(0, self.inputs[0].flatten(), rows_NO)
            return _Off(0.0, [], float((len(rows_NO) + parts) * added.norm()))
        x_NI = self.inputs[0].detach().reshape(-1, self.inputs[0].shape[-1])
        inner = x_NI.shape[1] + 2
        g_NO = given.reshape(-1, given.shape[-1])
        added = len(x_NI) + parts + 2
        if weight.dim() == 2:
            size_NO = x_NI.abs() @ weight.abs().t()
            return _Off(
                inner * float(size_NO.norm()),
                [(g_NO.shape[1] + 2) * float((g_NO.abs() @ weight.abs()).norm())],
                added * float((g_NO.abs().t() @ x_NI.abs()).norm() + g_NO.abs().sum(0).norm()),
            )
        # w·n + b of n = (x - mean) / deviation, with a mean and a mean of squares; its gradient is
        # (w·g - mean(w·g) - n·mean(w·g·n)) / deviation.
        count = 2 * inner + 8
        deviation_N1 = (x_NI.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        size_NI = (x_NI.abs() + x_NI.abs().mean(-1, keepdim=True)) / deviation_N1
        g_NI = (g_NO * weight).abs()
        mean_N1, along_N1 = (each.mean(-1, keepdim=True) for each in (g_NI, g_NI * size_NI))
        of_x_NI = (g_NI + mean_N1 + size_NI * along_N1) / deviation_N1
        return _Off(
            count * float((size_NI * weight).norm() + output.norm()),
            [count * float(of_x_NI.norm())],
            (added + count) * float((g_NO.abs() * (size_NI + 1)).sum(0).norm()),
        )

    def _attention(self, given: Tensor) -> _Off:
        from attention_truth import plain

        query, key, value = (each.detach().unsqueeze(1) for each in self.inputs)
        upstream = given.view(len(query), 1, query.shape[2], -1)
        ends = self.packed.cu_seqlens_q.tolist()
        lengths = [(start, end - start) for start, end in itertools.pairwise(ends)]

        def visible(length: int) -> Tensor:
            return torch.ones(length, length, dtype=torch.bool).tril()

        scale = query.shape[3] ** -0.5
        _, sizes, terms = plain([query, key, value, upstream], lengths, visible, scale)
        output, *of_inputs = (terms * float(each.norm()) for each in sizes)
        return _Off(output, of_inputs)


def _is_layer(module: nn.Module) -> bool:
    own = hasattr(module, "softmax_scale") or isinstance(getattr(module, "weight", None), Tensor)
    return own


class _Layers:
    """All calls of a model's layers, whose results can be moved, forward and backward.

    Points are the inputs and outputs of layers, in the order of the run.
    """

    def __init__(self, model: nn.Module, total: Callable[[], Tensor], between: int) -> None:
        self._total, self._between = total, between
        self._modules = [each for each in model.modules() if _is_layer(each)]
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._points: list[Tensor] = []
        self._calls: list[_Layer] = []
        self._shifts: list[Tensor] | None = None
        self.scales: list[float] = []
        """The most that results may be off: of all points, then of the gradients of all points."""

    def _moved(self, tensor: Tensor) -> Tensor:
        if self._shifts is None:
            shift = torch.zeros_like(tensor).requires_grad_()
        else:
            shift = self._shifts[len(self._points)]
        self._points.append(tensor + shift)
        return self._points[-1]

    def _run(self) -> Tensor:
        self._points, self._calls = [], []
        taken: dict[nn.Module, tuple[list[Tensor], Any, list[int]]] = {}

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            places, inputs, changed = [], [], []
            for each in args:
                if isinstance(each, Tensor) and each.is_floating_point():
                    places.append(len(self._points))
                    each = self._moved(each)
                if isinstance(each, Tensor):
                    inputs.append(each)
                changed.append(each)
            taken[module] = inputs, kwargs.get("packed_seq_params"), places
            return tuple(changed), kwargs

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            first, *others = output if isinstance(output, tuple) else (output,)
            inputs, packed, places = taken.pop(module)
            self._calls.append(_Layer(module, inputs, packed, places, len(self._points)))
            first = self._moved(first)
            return (first, *others) if isinstance(output, tuple) else first

        hooks = [each.register_forward_pre_hook(before, with_kwargs=True) for each in self._modules]
        hooks += [each.register_forward_hook(after) for each in self._modules]
        try:
            return self._total()
        finally:
            for hook in hooks:
                hook.remove()

    def measure(self, terms: int, parts: int) -> float:
        """Fill `scales`; return what is off beside that: sums of parameters' gradients."""
        total = self._run()
        given = self._given(total)
        norms = [float(each.detach().norm()) for each in self._points]
        results = [0.0] * len(norms)
        gradients = [self._between * float(each.norm()) for each in given]
        own, before = 0.0, 0.0
        for call in self._calls:
            of_inputs = [given[place] for place in call.places]
            off = call.off(self._points[call.place].detach(), given[call.place], of_inputs, parts)
            own += off.of_own
            results[call.place] = off.output
            for place, of_input in zip(call.places, off.of_inputs, strict=True):
                # What lies between is of the size of this input, or of the layer before it.
                results[place] = self._between * max(norms[place], before)
                gradients[place] += of_input
            before = norms[call.place]
        self.scales = [*results, *gradients]
        self._shapes = [each.shape for each in self._points]
        return self._last(total, own, terms, given[-1], len(norms) * 2 - 1)

    def _given(self, total: Tensor) -> list[Tensor]:
        """Return the gradients of all points."""
        raise NotImplementedError

    def _last(self, total: Tensor, own: float, terms: int, given: Tensor, place: int) -> float:
        """Count the roundings after the last layer."""
        raise NotImplementedError

    def _value(self, parts: list[Tensor], **options: Any) -> Tensor:
        """Return what is bounded, a vector, with all points moved by so much."""
        raise NotImplementedError

    def cut(self, vector: Tensor) -> list[Tensor]:
        """Return the parts of a vector, each in the shape of its point, times its scale."""
        sizes = [each.numel() for each in self._shapes] * 2
        parts = zip(vector.split(sizes), self.scales, self._shapes * 2, strict=True)
        return [scale * part.view(shape) for part, scale, shape in parts]

    def elements(self) -> int:
        return 2 * sum(each.numel() for each in self._shapes)

    def towards(self, vector: Tensor) -> Tensor:
        """J·D·vector, of a difference on both sides."""
        parts = self.cut(STEP * vector)
        there, back = (self._value([sign * part for part in parts]).detach() for sign in (1, -1))
        return (there - back) / (2 * STEP)

    def back(self, vector: Tensor) -> Tensor:
        """D·Jᵀ·vector, of the value's product with it."""
        parts = [torch.zeros(shape).double().requires_grad_() for shape in self._shapes * 2]
        value = self._value(parts, create_graph=True)
        found = torch.autograd.grad(value @ vector, parts, **_EVERY)
        return torch.cat([scale * g.flatten() for g, scale in zip(found, self.scales, strict=True)])


class _Outputs(_Layers):
    """The outputs, of which gradients are no part."""

    def _given(self, total: Tensor) -> list[Tensor]:
        return [torch.zeros_like(each) for each in self._points]

    def _last(self, total: Tensor, own: float, terms: int, given: Tensor, place: int) -> float:
        return terms * float(total.norm())

    def _value(self, parts: list[Tensor], **options: Any) -> Tensor:
        self._shifts = parts[: len(parts) // 2]
        return self._run().flatten()


class _Gradients(_Layers):
    """The gradient of all parameters, and its norm."""

    size = 0.0

    def _gradient(self, total: Tensor, **options: Any) -> Tensor:
        found = torch.autograd.grad(total, self._parameters, **_EVERY, **options)
        return torch.cat([each.flatten() for each in found])

    def _given(self, total: Tensor) -> list[Tensor]:
        self.size = float(self._gradient(total, retain_graph=True).norm())
        return list(torch.autograd.grad(total, self._points, **_EVERY))

    def _last(self, total: Tensor, own: float, terms: int, given: Tensor, place: int) -> float:
        self.scales[place] += terms * float(given.norm())
        return own

    def _value(self, parts: list[Tensor], **options: Any) -> Tensor:
        half = len(parts) // 2
        self._shifts = parts[:half]
        total = self._run()
        pairs = zip(self._points, parts[half:], strict=True)
        # What is to be added to the gradient of a point.
        total = total + sum((point * part).sum() for point, part in pairs)
        return self._gradient(total, **options)
