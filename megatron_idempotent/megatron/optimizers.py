"""Describes Megatron's optimizers: their parameters, main parameters and loss scale."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def is_torch_adam(optimizer: Any) -> bool:
    """Return whether a Megatron optimizer steps with torch's Adam or AdamW.
    That is the fallback without Apex and Transformer Engine; it alone counts steps per parameter.
    """
    import torch
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE and all(
        isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))
        for inner in stepping(optimizer.optimizer)
    )


def is_hybrid(inner: Any) -> bool:
    """Return whether `inner` is Megatron's `HybridDeviceOptimizer`, which can step on the host."""
    return hasattr(inner, "param_to_inner_param")


def mark_part(parameter: Any, dimension: int) -> None:
    """Mark a parameter as a tensor-parallel shard along a dimension, as Megatron's own layers do.

    Without the mark the gradient norm counts the parameter on the first rank only.
    """
    parameter.tensor_model_parallel = True
    parameter.partition_dim = dimension
    parameter.partition_stride = 1


def stepping(inner: Any) -> list[Any]:
    """Return the torch optimizers inside a hybrid optimizer; `[inner]` for any other optimizer."""
    return list(inner.sub_optimizers) if is_hybrid(inner) else [inner]


def renew_copies(hybrid: Any, *, widened: bool = True) -> None:
    """Copy current parameter values into the copies that a hybrid optimizer steps instead.
    The copies are on the host or in float32.

    Without `widened` float32 copies of 16-bit parameters are skipped, to keep their extra bits.
    """
    for parameter, inner in hybrid.param_to_inner_param.items():
        if inner is not parameter and (widened or inner.dtype == parameter.dtype):
            inner.data.copy_(parameter.data)


def main_parameters(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (this rank's shard of a 16-bit parameter [N], its float32 main parameter) pairs.

    Quantized parameters are skipped, and so is Megatron-FSDP, which has its own main parameters.
    """
    import torch

    for part in unchained(optimizer):
        inner: Any = getattr(part, "optimizer", None)
        widened = getattr(inner, "param_to_fp32_param", {})
        if hasattr(part, "shard_fp32_from_float16_groups"):
            sharded = "model_float16_groups", "shard_fp32_from_float16_groups"
            models, mains, shards = (
                chain.from_iterable(getattr(part, name))
                for name in (*sharded, "shard_float16_groups")
            )
            for model, main, shard in zip(models, mains, shards, strict=True):
                if type(model) not in (torch.Tensor, torch.nn.Parameter):
                    continue
                if main is None:  # the inner optimizer's own: precision-aware
                    main = widened.get(shard, inner.state.get(shard, {}).get("master_param"))
                    if main is None or main.dtype != torch.float32:
                        continue  # the first step creates it, or it has only the low bits
                span = part._get_model_param_range_map(model)["param"]
                yield model.detach().view(-1)[span.start : span.end], main.detach().view(-1)
        elif hasattr(part, "fp32_from_float16_groups"):
            models, mains = (
                chain.from_iterable(getattr(part, name))
                for name in ("float16_groups", "fp32_from_float16_groups")
            )
            for model, main in zip(models, mains, strict=True):
                yield model.detach().view(-1), main.detach().view(-1)


#: Names of an optimizer's lists: the model's parameters, the tensors that are stepped for them,
#: and the tensors that are stepped where the second list has None.
_STEPPED = (
    ("model_float16_groups", "shard_fp32_from_float16_groups", "shard_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
    ("float16_groups", "fp32_from_float16_groups"),
    ("fp32_from_fp32_groups", "fp32_from_fp32_groups"),
)


def stepped(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (model parameter, tensor that the inner torch optimizer steps for it) for each
    parameter that this rank updates; the tensor is for example a float32 main parameter or its
    shard. Yield nothing for Megatron-FSDP, or for an optimizer that is not Megatron's.
    """
    for names in _STEPPED:
        lists = (chain.from_iterable(getattr(optimizer, name, ())) for name in names)
        for model, main, *shard in zip(*lists, strict=True):
            yield model, shard[0] if shard and main is None else main
    if type(optimizer).__name__ == "FP32Optimizer" and optimizer.optimizer is not None:
        for group in optimizer.optimizer.param_groups:
            yield from ((parameter, parameter) for parameter in group["params"])


def start_in(optimizer: Any, model: Any) -> int:
    """Return the index in a flat model parameter at which this rank's stepped shard begins."""
    if not hasattr(optimizer, "shard_fp32_from_float16_groups"):
        return 0
    return int(optimizer._get_model_param_range_map(model)["param"].start)


def in_fsdp(optimizer: Any) -> bool:
    """Return whether an optimizer steps the shards of Megatron-FSDP."""
    ddp_config = getattr(optimizer, "ddp_config", None)
    return bool(
        getattr(ddp_config, "use_megatron_fsdp", False)
        or getattr(ddp_config, "use_custom_fsdp", False)
    )


def frozen(optimizer: Any) -> list[Tensor]:
    """Return the tensors that an optimizer would step although their model parameter is frozen."""
    mains = [main for model, main in stepped(optimizer) if not model.requires_grad]
    if in_fsdp(optimizer) and optimizer.optimizer is not None:
        for group in optimizer.optimizer.param_groups:
            for shard in group["params"]:
                # The module has the shard at some times, and the complete parameter at others.
                parameter = getattr(shard, "orig_param", shard)
                if not (shard.requires_grad and parameter.requires_grad):
                    mains.append(shard)
    return mains


def leave_out(inner: Any, mains: Iterable[Any]) -> None:
    """Drop the gradients of main parameters, so that the torch optimizer `inner` skips them."""
    for main in mains:
        main.grad = None
        if hasattr(main, "decoupled_grad"):
            main.decoupled_grad = None
        if is_hybrid(inner):  # the copy has the gradient of an earlier step
            copy = inner.param_to_inner_param[main]
            copy.grad = None
            inner.cpu_copy_map_grad.pop(copy, None)


def count_step(inner: Any, mains: Iterable[Any]) -> None:
    """Give the main parameters `mains`, whose step `leave_out` skipped, the step count of a
    parameter that was stepped, so that all counts are equal. Do nothing if no parameter was
    stepped.

    Megatron saves one count for all. A tensor that was never stepped gets an optimizer state like
    that of a stepped one, with moments of zero.
    """
    import torch

    copies = {inner.param_to_inner_param[main] if is_hybrid(inner) else main for main in mains}
    states = chain.from_iterable(optimizer.state.items() for optimizer in stepping(inner))
    stepped = [(key, state) for key, state in states if state and key not in copies]
    if not stepped:
        return
    stepped_tensor, stepped_state = stepped[0]
    for optimizer in stepping(inner):
        for copy in (tensor for group in optimizer.param_groups for tensor in group["params"]):
            if copy not in copies:
                continue
            state = optimizer.state[copy]
            for key, value in () if state else stepped_state.items():
                moments = torch.is_tensor(value) and value.shape == stepped_tensor.shape
                state[key] = torch.zeros_like(copy, dtype=value.dtype) if moments else value
            if "step" in state:
                state["step"] = stepped_state["step"].clone()
    if is_hybrid(inner):
        inner._sync_sub_optimizers_state_to_hdo()


def outdated(model: Tensor, main: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mask of the elements of parameter `model` that something other than the optimizer
    has written since the last step, so that `main` lacks their values. Also return `model` on the
    device of `main`.

    The main parameter of such an element does not round to the model's value, as it does after a
    step.
    """
    moved = model if main.is_cuda else model.cpu()
    return main.to(moved.dtype).ne(moved).logical_and_(~moved.isnan()), moved


def count_outdated(optimizer: Any, device: Any) -> Tensor:
    """Count this rank's parameter elements that were written into the model after the last step.
    The elements are those that `outdated` finds. Return a float64 scalar on `device`.
    """
    import torch

    count = torch.zeros((), dtype=torch.float64, device=device)
    for model, main in main_parameters(optimizer):
        count += outdated(model, main)[0].sum().to(device, non_blocking=True)
    return count


SCALED = "_megatron_idempotent_scaled_by_caller"


OURS = "_megatron_idempotent_scaling"


class LossScale:
    """Callable that multiplies a loss by an optimizer's loss scale.
    It has a weak reference to the optimizer; copies and pickles of it leave the optimizer out.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Any:
        """The optimizer whose loss scale is used; None if that optimizer no longer exists."""
        return self._optimizer()

    def __call__(self, loss: Tensor) -> Tensor:
        """Return `loss`, of any shape, times the optimizer's current loss scale.

        It is unchanged if the optimizer no longer exists, or if the caller scales the loss itself.
        """
        optimizer = self._optimizer()
        if optimizer is None or any(SCALED in vars(part) for part in parts(optimizer)):
            return loss
        setattr(optimizer, OURS, True)
        try:
            scaled: Tensor = optimizer.scale_loss(loss)
        finally:
            delattr(optimizer, OURS)
        return scaled

    def __deepcopy__(self, memo: dict[int, Any]) -> LossScale:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # In another process the optimizer does not exist; upstream's config has None by default.
        return type(None), ()


def trained_by(optimizer: Any) -> list[Any]:
    """Return the model's parameters that an optimizer, or a chain of them, updates on this rank."""
    return [model for part in unchained(optimizer) for model, _ in stepped(part)]


def unchained(optimizer: Any) -> list[Any]:
    """Return the optimizers in a chain and in nested chains, or [optimizer] without a chain.

    The list is empty for None.
    """
    if not hasattr(optimizer, "chained_optimizers"):
        return [] if optimizer is None else [optimizer]
    return [inner for part in optimizer.chained_optimizers for inner in unchained(part)]


def grad_scalers(optimizer: Any) -> list[Any]:
    """Return the gradient scalers of an optimizer, or of the optimizers in a chain.
    Optimizers whose scaler is None are left out.
    """
    scalers = [getattr(part, "grad_scaler", None) for part in unchained(optimizer)]
    return [scaler for scaler in scalers if scaler is not None]


def parts(optimizer: Any) -> list[Any]:
    """Return the optimizer, followed by the optimizers in it if it is a chain."""
    return [optimizer, *getattr(optimizer, "chained_optimizers", ())]
