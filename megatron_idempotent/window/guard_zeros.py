"""Zeros that a rank gives to the schedule in place of what it could not compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class _NoGradient(torch.autograd.Function):
    """A loss of zero that sends zeros backwards through the whole graph.

    The backward is a real one, so that every collective inside the model and every gradient hook
    takes place as on the other ranks, at any tensor parallel size.
    """

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.like = [(each.shape, each.dtype, each.device) for each in outputs]
        return torch.zeros((), dtype=torch.float32, device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like
        )


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Returns the tensors of a last stage's output: itself, or those of a tuple or a list."""
    parts = output if isinstance(output, (tuple, list)) else [output]
    return [each for each in parts if isinstance(each, torch.Tensor)]


def no_gradient(output: Any) -> torch.Tensor:
    """A scalar loss of zero, for which the backward through `output` is all zeros."""
    loss: torch.Tensor = _NoGradient.apply(*tensors_of(output))  # type: ignore[no-untyped-call]
    return loss


def output_like(arguments: Mapping[str, Any], config: Any, input_tensor: Any, device: Any) -> Any:
    """A stage's output [s, b, h] of zeros, in the structure that `forward_step` returns.

    The shape is what the receiving stage has allocated: as `get_tensor_shapes` computes it, or,
    where shapes travel with the messages, that of the input.
    """
    received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
    if config.variable_seq_lengths and received is not None:
        shape = tuple(received.shape)
    else:
        tokens = arguments.get("decoder_seq_length") or arguments["seq_length"]
        tokens //= config.context_parallel_size
        if config.sequence_parallel:
            tokens //= config.tensor_model_parallel_size
        shape = (tokens, arguments["micro_batch_size"], config.hidden_size)
        adjust = arguments.get("adjust_tensor_shapes_fn")
        if adjust is not None:
            shape = tuple(adjust([shape], [shape])[1][0])
    dtype = config.pipeline_dtype or config.params_dtype
    output = torch.zeros(shape, dtype=dtype, device=device)
    return [output] if isinstance(input_tensor, list) else output


def gradient_like(input_tensor: Any) -> Any:
    """Zeros in the structure that `backward_step` returns for `input_tensor`."""
    if input_tensor is None:
        return None
    if isinstance(input_tensor, list):
        return [gradient_like(tensor) for tensor in input_tensor]
    return torch.zeros_like(input_tensor)
