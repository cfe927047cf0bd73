"""A sum over tensor-parallel ranks is lost if the tensor is not contiguous.

Symptom:
    `reduce_from_tensor_model_parallel_region(y.t())` returns this rank's `y.t()`. The gradient that
    `copy_to_tensor_model_parallel_region(x)` gives `x` is this rank's alone, if a `sum()`, an
    `expand` or a transpose follows. It happens in custom heads, adapters and losses, and the ranks'
    parameters drift apart. No error.

Cause:
    `_reduce` sums `input_.contiguous()` in place and returns `input_`. For a tensor that is not
    contiguous, `contiguous()` is a copy, and the sum is lost with it.

Affects:
    0.12 to 0.18. What the patch does: a tensor that is not contiguous is copied before the sum, and
    the copy is returned, as 0.19 does. Contiguous tensors are summed in place, as before.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/5338 repairs it in 0.19.

Remove when:
    all supported releases return the tensor that they have summed.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, a_body_has, bench, target


def reduce(original: Original, input_: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap Megatron's all-reduce of a tensor: make the tensor contiguous first.
    Upstream reduces a contiguous copy, and returns the unreduced tensor.
    """
    if not input_.is_contiguous() and _size(kwargs.get("group", args[0] if args else None)) > 1:
        input_ = input_.contiguous()
    return original(input_, *args, **kwargs)


def _size(group: Any) -> int:
    """Return the number of ranks of a group; for None, of the tensor-parallel group."""
    from megatron.core import parallel_state

    if group is None:
        group = parallel_state.get_tensor_model_parallel_group()
    return int(group.size())


def reproduce() -> None:
    """Sum a transposed tensor, and an expanded gradient, over two tensor-parallel ranks.
    On stock Megatron both results have this rank's values only.
    """
    import torch
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
    )

    bench(tp=2, overlap_grad_reduce=False, with_optimizer=False, wire=False)
    number = torch.distributed.get_rank() + 1.0
    transposed = torch.full((4, 3), number, device="cuda").t()
    summed = reduce_from_tensor_model_parallel_region(transposed)
    inputs = torch.ones(3, 4, device="cuda", requires_grad=True)
    (copy_to_tensor_model_parallel_region(inputs).sum() * number).backward()
    results: dict[str, Any] = {"sum": summed, "gradient": inputs.grad}
    for name, tensor in results.items():
        if not torch.equal(tensor, torch.full_like(tensor, 3.0)):
            raise Fault(f"the {name} of ones and twos of two ranks is {float(tensor[0, 0]):g}")


PATCH = Patch(
    "a sum over tensor-parallel ranks is lost where the tensor is not contiguous",
    target("core.tensor_parallel.mappings:_reduce", reduce),
    before="0.19",
    fixed_when=a_body_has("input_ = input_.contiguous()"),
)
