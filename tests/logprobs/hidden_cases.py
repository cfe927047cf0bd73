"""Hidden states whose logits are exact, and what float64 says of their gradients. Runs on a rank.

Legend: H features, V columns of the whole vocabulary, v those of a rank.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
import torch.distributed as dist
from cases import Case, U, close

H = 8


def widths(seed: int) -> tuple[int, ...]:
    """Columns of a rank; with more than 256, and little memory, it merges several parts."""
    return (1, 3, 40) if seed % 2 else (300, 600)


def with_hidden(given: Case) -> tuple[Case, Any, Any]:
    """Draw hidden states and a weight in the place of a case's logits, which are their product.

    Both are whole numbers of 1/4 up to 1, so that a product of H features is one of 1/16 up to 8:
    exact in each type and in any order. Once in a while the weight is four times as large.
    """
    *shape, columns = given.whole.shape
    dtype = given.whole.dtype
    hidden = torch.randint(-4, 5, (*shape, H)).to(dtype) / 4
    weight = torch.randint(-4, 5, (columns, H)).to(dtype) / 4
    weight = weight * (4 if int(torch.randint(0, 4, ())) == 0 else 1)
    whole = (hidden.double() @ weight.double().t()).to(dtype)
    arguments = {**given.arguments, "ownership": "borrow"}
    if columns > 256 * dist.get_world_size():
        arguments["workspace_bytes"] = 1000
    return dataclasses.replace(given, whole=whole, arguments=arguments), hidden, weight


def gradients(
    hidden: Any, weight: Any, values: Any, bounds: Any, size: int
) -> dict[str, tuple[Any, Any]]:
    """Gradients of hidden states and weight out of that of the logits, with a bound for each.

    A gradient is a product of the logits' gradient, whose own error is multiplied too, and sums up
    V columns or all tokens: each of them, and the addition of another part, is one rounding of the
    computing type. The product of a part is rounded to the type of the model, and so is what comes
    out; under sequence parallelism ranks add up in that type.
    """
    u = U.get(hidden.dtype, U[torch.float32])
    out = u if hidden.dtype == torch.float64 else torch.finfo(hidden.dtype).eps / 2
    of_logits_tV, bound_tV = (
        each["gradient"].reshape(-1, len(weight)) for each in (values, bounds)
    )
    hidden_tH, weight_VH = hidden.double().reshape(-1, H), weight.double()
    tokens, columns = of_logits_tV.shape

    def product(first: Any, second: Any, of_first: Any, terms: int, rounded: int) -> Any:
        size_of = first.abs() @ second.abs()
        least = torch.finfo(hidden.dtype).smallest_normal
        return first @ second, (
            of_first @ second.abs() + ((terms + 2) * u + rounded * out) * size_of + least
        )

    of_hidden = product(of_logits_tV, weight_VH, bound_tV, columns, size + 2)
    of_weight = product(of_logits_tV.t(), hidden_tH, bound_tV.t(), tokens, 1)
    return {
        "hidden": tuple(each.view(hidden.shape) for each in of_hidden),
        "weight": of_weight,
    }


def within_bounds(kind: str, seed: int) -> list[bytes]:
    """Call on a rank that shares the vocabulary, with hidden states whole and in pieces.

    Holds each output, and the gradients of both inputs, to its bound. Returns outputs as bytes.
    """
    of_kind = importlib.import_module(kind)
    rank, size = dist.get_rank(), dist.get_world_size()
    given, hidden, weight = with_hidden(of_kind.case(seed, size, widths(seed)))
    given.of_logprob *= torch.rand(given.of_logprob.shape) < 0.5  # few are differentiated
    values, bounds = of_kind.truth(given)
    exact = gradients(hidden, weight, values, bounds, size)
    found = []
    for layout in ("replicated", "sequence_parallel"):
        pieces = layout == "sequence_parallel"
        if pieces and (hidden.dim() == 1 or hidden.shape[0] % size):
            continue
        part = (hidden.chunk(size)[rank] if pieces else hidden).clone().requires_grad_()
        matrix = weight.chunk(size)[rank].clone().requires_grad_()
        form = {"hidden": part, "weight": matrix, "hidden_layout": layout}
        outputs = of_kind.outputs(given, tp_group=dist.group.WORLD, **form)
        of_kind.total(outputs, given).backward()
        name = (seed, given.whole.dtype, layout)
        for what, value in outputs.items():
            if value is not None:
                close(what, value, values[what], bounds[what], name)
                found.append(value.detach().numpy().tobytes())
        for what, leaf, cut in (("hidden", part, pieces), ("weight", matrix, True)):
            wanted, bound = (each.chunk(size)[rank] if cut else each for each in exact[what])
            close(f"gradient of {what}", leaf.grad, wanted, bound, name)
    return found
