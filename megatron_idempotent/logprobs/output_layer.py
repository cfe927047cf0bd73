"""Hidden states on their way into Megatron's output layer, which makes log-probs of them.

Legend: B batch, S positions, H features, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from .api import TokenStats, token_logprobs
from .sampling import Sampling

_INSTEAD = "take the logits, and token_logprobs(logits=…)"


def stats_of(
    layer: Any, hidden_SBH: Tensor, output_weight: Tensor | None, arguments: dict[str, Any]
) -> TokenStats:
    """`token_logprobs` of what the layer would make logits of; stats are [B, S] as the targets.

    The module is called as ever, and so are its hooks: DDP's, which waits for parameters that are
    still being gathered and starts the next gather, and FSDP2's, which unshards them. What runs
    inside is ours.

    Raises:
        ValueError: a layer that does more than a product with its weight, or arguments that do not
            fit.
    """
    _accept(layer)
    size = 1 if not layer.sequence_parallel else _group(layer).size()
    shape_BS = hidden_SBH.shape[1], hidden_SBH.shape[0] * size
    arguments = {name: _turned(name, value, shape_BS) for name, value in arguments.items()}

    def forward(
        hidden_SBH: Tensor, weight: Tensor | None = None, **_: Any
    ) -> tuple[TokenStats, None]:
        weight_VH = layer.weight if weight is None else weight
        recorded = torch.is_grad_enabled() and weight_VH.requires_grad
        found = token_logprobs(
            hidden=hidden_SBH,
            weight=weight_VH,
            tp_group=_group(layer),
            hidden_layout="sequence_parallel" if layer.sequence_parallel else "replicated",
            **arguments,
            **_into_main_grad(layer, recorded),
        )
        return TokenStats(*map(_back, found)), None

    found = _called(layer, forward, hidden_SBH, output_weight)
    if not isinstance(found, TokenStats):
        raise RuntimeError(
            f"a forward hook of the output layer made a {type(found).__name__} of its "
            f"TokenStats: remove the hook, or {_INSTEAD}"
        )
    return found


def scale_of(scale_logits: Callable[[Tensor], Tensor] | None) -> float:
    """Returns the factor by which the model multiplies its logits after the output layer (muP).

    Raises:
        ValueError: it does something else to them.
    """
    if scale_logits is None:
        return 1.0
    probe = torch.tensor([1.0, -64.0, 0.5], dtype=torch.float64, device="cpu")
    scaled = scale_logits(probe.clone())
    scale = float(scaled[0])
    if not 0 < scale < float("inf") or not torch.equal(scaled, probe * scale):
        raise ValueError(
            f"the model's scale_logits makes {scaled.tolist()} of logits {probe.tolist()}, not "
            f"their product with a positive number: {_INSTEAD}"
        )
    return scale


def _called(
    layer: Any, forward: Callable[..., Any], hidden: Tensor, weight: Tensor | None
) -> object:
    # An attribute of the instance, which the module's __call__ prefers to the class's method.
    layer.forward = forward
    try:
        found, _ = layer(hidden, weight=weight)
    finally:
        del layer.forward
    return found


def _accept(layer: Any) -> None:
    kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
    more = None
    if not isinstance(layer, ColumnParallelLinear):
        more = f"is a {kind}, not Megatron's ColumnParallelLinear"
    elif "forward" in vars(layer) or type(layer).forward is not ColumnParallelLinear.forward:
        more = f"({kind}) has a forward that is not ColumnParallelLinear's"
    elif layer.bias is not None:
        more = "has a bias"
    elif layer.disable_grad_reduce:
        more = "has disable_grad_reduce=True, so its input's gradient is to stay a share"
    elif getattr(layer, "gtp_remat_size", 1) > 1:
        more = f"has a weight of which {layer.gtp_remat_size} ranks have a piece each (gtp_remat)"
    if more is not None:
        raise ValueError(
            f"the output layer {more}; log-probs out of hidden states know a product with a "
            f"weight and nothing else: {_INSTEAD}"
        )


def _into_main_grad(layer: Any, recorded: bool) -> dict[str, Any]:
    if not recorded:
        return {}
    if layer.config.defer_embedding_wgrad_compute:
        raise ValueError(
            "config.defer_embedding_wgrad_compute=True keeps logit gradients for the end of the "
            f"window, and here there are none: set it to False, or {_INSTEAD}"
        )
    if layer.gradient_accumulation_fusion:
        return {"gradient_accumulation_fusion": True}
    return {}


def _group(layer: Any) -> Any:
    # A layer knows its group from 0.13 on.
    group = getattr(layer, "tp_group", None)
    return parallel_state.get_tensor_model_parallel_group() if group is None else group


def _turned(name: str, value: Any, shape_BS: tuple[int, int]) -> Any:
    """Returns values of each token in the order of the hidden states."""
    if isinstance(value, Sampling) and value.keep is not None:
        keep = _turned("sampling.keep", value.keep, shape_BS)
        return dataclasses.replace(value, keep=keep)
    if not isinstance(value, Tensor):
        return value
    if value.shape[:2] != shape_BS:
        raise ValueError(
            f"model_logprobs() got {name} of shape {tuple(value.shape)}, and hidden states of "
            f"{shape_BS[0]} rows with {shape_BS[1]} positions"
        )
    return value.transpose(0, 1)


def _back(per_token_SB: Tensor | None) -> Any:
    return None if per_token_SB is None else per_token_SB.t().contiguous()
