"""Computes a step from its definition, in float64 on one process: no layout, no schedule, no DDP.

A small GPT is written out with plain torch functions of a dictionary of parameters, under the
names that Megatron gives them. Legend: B rows, T positions, H hidden size, A heads, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from .protocol import Rows

Parameters = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """Holds what a step is by definition.

    Example: `truth_of(parameters, rows, layers=2, heads=4).grad_norm`.
    """

    gradient: dict[str, Tensor]
    """The gradient of the mean over all positions that count, by parameter; float64."""
    grad_norm: float
    loss: float
    """The mean itself."""
    count: float
    """The number of positions that count."""


def truth_of(
    parameters: Parameters, rows: Iterable[Rows], *, layers: int, heads: int, epsilon: float = 1e-5
) -> Truth:
    """Compute loss and gradient of all rows together.

    Args:
        parameters: all parameters of the whole model, by Megatron's names.
        rows: the rows of all replicas and calls, in any order.
        layers: the number of transformer layers.
        heads: the number of attention heads.
        epsilon: that of layer norms.
    """
    own = {name: value.detach().double().requires_grad_() for name, value in parameters.items()}
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for each in rows:
        for tokens_BT, mask_BT in _alone(each):
            nll_BT = negative_logprobs(own, tokens_BT, layers, heads, epsilon)
            total = total + (nll_BT * mask_BT).sum()
            count += float(mask_BT.sum())
    if count:
        torch.autograd.backward(total / count)
    gradient = {
        name: torch.zeros_like(value) if value.grad is None else value.grad
        for name, value in own.items()
    }
    norm = math.sqrt(sum(float(each.square().sum()) for each in gradient.values()))
    return Truth(
        gradient=gradient, grad_norm=norm, loss=float(total.detach()) / (count or 1.0), count=count
    )


def _alone(rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens [B, T] and what counts of them; one by one, without padding, of lengths."""
    tokens_BT, mask_BT = rows["input_ids"], counted(rows).double()
    if "lengths" not in rows:
        if len(tokens_BT):
            yield tokens_BT, mask_BT
        return
    for row, length in enumerate(rows["lengths"].tolist()):
        yield tokens_BT[row : row + 1, :length], mask_BT[row : row + 1, :length]


def counted(rows: Rows) -> Tensor:
    """Returns 1 where position t predicts a token that counts, [B, T]; 0 at the last one."""
    mask_BT = rows["token_mask"] * rows["sample_mask"][:, None]
    return functional.pad(mask_BT[:, 1:], (0, 1))


def negative_logprobs(
    parameters: Parameters, tokens_BT: Tensor, layers: int, heads: int, epsilon: float = 1e-5
) -> Tensor:
    """Returns -log p of the token after each position, [B, T]; after the last one of the first."""
    logits_BTV = logits(parameters, tokens_BT, layers, heads, epsilon)
    targets_BT1 = tokens_BT.roll(-1, 1)[..., None]
    return -logits_BTV.log_softmax(-1).gather(-1, targets_BT1)[..., 0]


def logits(
    parameters: Parameters, tokens_BT: Tensor, layers: int, heads: int, epsilon: float
) -> Tensor:
    """Returns the logits [B, T, V] of a GPT with learned positions, layer norms and GELU."""

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        weight = parameters[f"{name}.weight"]
        return functional.layer_norm(
            x, weight.shape, weight, parameters[f"{name}.bias"], eps=epsilon
        )

    batch, length = tokens_BT.shape
    x_BTH = parameters["embedding.word_embeddings.weight"][tokens_BT]
    x_BTH = x_BTH + parameters["embedding.position_embeddings.weight"][:length]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    for index in range(layers):
        at = f"decoder.layers.{index}"
        mixed = linear(norm(x_BTH, f"{at}.input_layernorm"), f"{at}.self_attention.linear_qkv")
        # Each head has its query, key and value one after the other.
        q, k, v = mixed.view(batch, length, heads, 3, -1).permute(3, 0, 2, 1, 4)
        scores_BATT = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        seen = scores_BATT.masked_fill(later, -math.inf).softmax(-1) @ v
        x_BTH = x_BTH + linear(
            seen.transpose(1, 2).reshape(batch, length, -1), f"{at}.self_attention.linear_proj"
        )
        inner = linear(norm(x_BTH, f"{at}.pre_mlp_layernorm"), f"{at}.mlp.linear_fc1")
        x_BTH = x_BTH + linear(functional.gelu(inner), f"{at}.mlp.linear_fc2")
    return linear(norm(x_BTH, "decoder.final_layernorm"), "output_layer")


class Update:
    """Predicts what an optimizer does with a gradient: SGD with momentum, or Adam.

    Example: `Update("sgd", lr=0.5, momentum=0.5).next(parameters, gradient)`.
    """

    def __init__(self, kind: str, *, lr: float, **options: float) -> None:
        """Take `momentum` for "sgd", or `beta1`, `beta2` and `epsilon` for "adam"."""
        self._kind, self._lr, self._options = kind, lr, options
        self._first: dict[str, Tensor] = {}
        self._second: dict[str, Tensor] = {}
        self._steps = 0

    def next(self, parameters: Parameters, gradient: Parameters) -> dict[str, Tensor]:
        """Return the parameters after one more step, in float64."""
        self._steps += 1
        return {
            name: value.detach().double() - self._lr * self._direction(name, gradient[name])
            for name, value in parameters.items()
        }

    def without(self, parameters: Parameters) -> dict[str, Tensor]:
        """Return where a next step with a gradient of zeros would lead, and take none."""
        kept = dict(self._first), dict(self._second), self._steps
        zeros = {name: torch.zeros_like(value).double() for name, value in parameters.items()}
        try:
            return self.next(parameters, zeros)
        finally:
            self._first, self._second, self._steps = kept

    def _direction(self, name: str, gradient: Tensor) -> Tensor:
        options = self._options
        if self._kind == "sgd":
            before = self._first.get(name)
            self._first[name] = (
                gradient if before is None else options["momentum"] * before + gradient
            )
            return self._first[name]
        beta1, beta2 = options["beta1"], options["beta2"]
        zero = torch.zeros_like(gradient)
        self._first[name] = beta1 * self._first.get(name, zero) + (1 - beta1) * gradient
        self._second[name] = beta2 * self._second.get(name, zero) + (1 - beta2) * gradient.square()
        first = self._first[name] / (1 - beta1**self._steps)
        second = self._second[name] / (1 - beta2**self._steps)
        return first / (second.sqrt() + options["epsilon"])
