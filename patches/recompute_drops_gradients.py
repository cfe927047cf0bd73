"""Parameters that are trained after frozen ones lose their gradients where they are recomputed.

Symptom:
    With activation recomputation and a frozen embedding, as adapters (LoRA) leave it, no adapter of
    the first pipeline stage gets a gradient: all of it with recompute_method="uniform", with
    "block" or selective recomputation that of the layers up to the first one that is not
    recomputed. The loss is computed, `optimizer.step()` reports success, and with several stages
    the gradient's norm is that of the others. On one stage it is 0.

Cause:
    A recomputed piece is one node of autograd's graph, which is recorded only if one of its inputs
    requires a gradient. The parameters inside are no inputs. The output of a frozen embedding
    requires none, and then neither does that of the piece; a schedule leaves out the backward of
    an output that requires no gradient.

Affects:
    Every release. What the patch does: where gradients are recorded, no input of the piece requires
    one and something inside is trained, the piece is given its first input as one that requires a
    gradient, in the same memory. Pieces in which nothing is trained are left alone. Not covered:
    Transformer Engine's checkpoint, which FP8 takes, and pieces whose output is discarded
    (`CheckpointWithoutOutput`: norms, the activation of experts). There, and without the patch, let
    the embedding's output require a gradient: `embedding.register_forward_hook(lambda module,
    inputs, output: output.requires_grad_())`, as Megatron-Bridge does. Nor is `mlp` among
    recompute_modules with biases, whose backward never ends on stock, whatever is trained.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/tensor_parallel/random.py,
    `checkpoint`. https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/1750, "PEFT Training fails
    for dense models when PP = 1 when activation checkpointing is on", and
    https://github.com/modelscope/ms-swift/issues/5714 meet it;
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5586 mends it again, for hybrid stacks.

Remove when:
    a recomputed piece is recorded for the parameters inside of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from ._case import Fault, Original, Patch, bench, target


def checkpoint(
    original: Original, function: Any, distribute_saved_activations: bool, *args: Any
) -> Any:
    """Run `tensor_parallel.checkpoint` so that a piece with trained parameters is recorded."""
    import torch

    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    if (
        torch.is_grad_enabled()
        and tensors
        and not any(each.requires_grad for each in tensors)
        and any(each.requires_grad for module in _modules(function) for each in module.parameters())
    ):
        first = next((each for each in tensors if each.is_floating_point()), None)
        args = tuple(_recorded(each) if each is first else each for each in args)
    return original(function, distribute_saved_activations, *args)


def _recorded(tensor: Any) -> Any:
    """Return the same values in the same memory, no view, with a gradient that is asked for."""
    import torch

    # Not detach(), whose views cannot be put aside as distribute_saved_activations does.
    found = torch.empty((1,), dtype=tensor.dtype, device=tensor.device)
    found.data = tensor.data
    return found.requires_grad_()


def _modules(function: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the modules that a function runs, as far as it holds them itself."""
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
        held: dict[str, Any] = {
            n: c.cell_contents for n, c in zip(names, cells, strict=True) if _is_set(c)
        }
        owner, start, end = (held.get(name) for name in ("self", "start", "end"))
        layers = getattr(owner, "layers", None)
        if layers is not None and isinstance(start, int) and isinstance(end, int):
            yield from layers[start:end]  # a piece of a block is some of its layers
        else:
            for each in held.values():
                yield from _modules(each, depth - 1)


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  what is asked for is whether it raises
    except ValueError:
        return False
    return True


def _freeze(module: Any) -> None:
    """Train the first layer norm of each layer and nothing else."""
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
    """Run a window in which all layers are recomputed, and one in which the first one is."""
    wanted = _gradients()
    for method in ("uniform", "block"):
        found = _gradients(**_FULL, recompute_method=method)
        if not found.equal(wanted):
            raise Fault(
                f"recomputed with {method!r}, the gradient's norm is {float(found.norm()):.3g}; "
                f"it is {float(wanted.norm()):.3g} where nothing is recomputed"
            )


PATCH = Patch(
    "with recomputation and a frozen embedding, adapters get no gradient, silently",
    target("random.checkpoint", checkpoint),
)
