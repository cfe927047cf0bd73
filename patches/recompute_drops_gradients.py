"""Parameters that are trained after frozen ones lose their gradients in recomputed layers.

Symptom:
    With activation recomputation and a frozen embedding, as with adapters (LoRA), adapters of the
    first pipeline stage get no gradient: none of them with recompute_method="uniform"; with "block"
    or selective recomputation none up to the first layer that is not recomputed. The loss is
    computed, `optimizer.step()` reports success, and with several stages the gradient's norm counts
    only the other stages. On one stage it is 0.

Cause:
    A recomputed piece is one node of autograd's graph, which is recorded only if one of its inputs
    requires a gradient. The parameters inside are not inputs. The output of a frozen embedding
    requires no gradient, so neither does the output of the piece, and a schedule skips the backward
    of an output that requires no gradient.

Affects:
    Every release. What the patch does: if gradients are enabled, no input of the piece requires
    one, and a parameter inside is trained, the piece gets its first input as a tensor that requires
    a gradient, in the same memory. Pieces without trained parameters are left alone. Not covered:
    Transformer Engine's checkpoint, which FP8 uses, and pieces whose output is discarded
    (`CheckpointWithoutOutput`: norms, the activation of experts). For these, and without the patch,
    let the embedding's output require a gradient: `embedding.register_forward_hook(lambda module,
    inputs, output: output.requires_grad_())`, as Megatron-Bridge does. Also not covered: `mlp`
    among recompute_modules with biases, whose backward never ends on stock.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/tensor_parallel/random.py,
    `checkpoint`. https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/1750, "PEFT Training fails
    for dense models when PP = 1 when activation checkpointing is on", and
    https://github.com/modelscope/ms-swift/issues/5714 report it;
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5586 repairs it for hybrid stacks.

Remove when:
    a recomputed piece is also recorded if only parameters inside of it require gradients.
    `upstream/recompute-drops-gradients` has the repair.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from ._case import Fault, Original, Patch, address, bench, target


def checkpoint(
    original: Original, function: Any, distribute_saved_activations: bool, *args: Any
) -> Any:
    """Wrap `tensor_parallel.checkpoint`: let autograd record calls that run trained parameters.
    Without the patch, a call whose inputs require no gradient is not recorded.
    """
    import torch

    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if (
        torch.is_grad_enabled()
        and tensors
        and not any(tensor.requires_grad for tensor in tensors)
        and any(p.requires_grad for module in _modules(function) for p in module.parameters())
    ):
        first = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        args = tuple(_recorded(value) if value is first else value for value in args)
    return original(function, distribute_saved_activations, *args)


def _recorded(tensor: Any) -> Any:
    """Return an alias of `tensor` that requires a gradient, is no view, and shares its memory.
    Autograd then records calls that take it.
    """
    import torch

    # Not detach(): distribute_saved_activations cannot replace the data of views.
    alias = torch.empty((1,), dtype=tensor.dtype, device=tensor.device)
    alias.data = tensor.data
    return alias.requires_grad_()


def _modules(function: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the modules that a function runs, as found in the function itself or in its closure."""
    import torch

    if isinstance(function, torch.nn.Module):
        yield function
    elif isinstance(function, functools.partial):
        for part in (function.func, *function.args, *function.keywords.values()):
            yield from _modules(part, depth - 1)
    elif isinstance(getattr(function, "__self__", None), torch.nn.Module):
        yield function.__self__
    elif depth and callable(function):
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells = getattr(function, "__closure__", None) or ()
        variables: dict[str, Any] = {
            n: c.cell_contents for n, c in zip(names, cells, strict=True) if _is_set(c)
        }
        owner, start, end = (variables.get(name) for name in ("self", "start", "end"))
        layers = getattr(owner, "layers", None)
        if layers is not None and isinstance(start, int) and isinstance(end, int):
            yield from layers[start:end]  # a piece of a block is some of its layers
        else:
            for value in variables.values():
                yield from _modules(value, depth - 1)


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  to see whether it raises
    except ValueError:
        return False
    return True


def _freeze(module: Any) -> None:
    """Freeze all parameters of a model except the layer norms of its layers."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("pre_mlp_layernorm" in name or "input_layernorm" in name)


def _gradients(**config: Any) -> Any:
    model = bench(
        config_overrides=config, before_ddp=_freeze, with_optimizer=False, overlap_grad_reduce=False
    )
    model.forward_backward(2, data_seed=0)
    return model.gradients()


_FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}


def reproduce() -> None:
    """Compare gradients with and without recomputation, for trained norms over a frozen embedding.
    On stock Megatron recomputed layers get no gradients.
    """
    expected = _gradients()
    for method in ("uniform", "block"):
        gradients = _gradients(**_FULL, recompute_method=method)
        if not gradients.equal(expected):
            raise Fault(
                f"recomputed with {method!r}, the gradient's norm is "
                f"{float(gradients.norm()):.3g}; it is {float(expected.norm()):.3g} without "
                "recomputation"
            )


PATCH = Patch(
    "with recomputation and a frozen embedding, adapters get no gradient, silently",
    target("random.checkpoint", checkpoint),
    fixed_by=(
        (address("random.checkpoint"), "isinstance(arg, torch.Tensor) and arg.requires_grad"),
    ),
)
