"""Applies the loss scale of Megatron's optimizers, and lists what they train."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def is_torch_adam(optimizer: Any) -> bool:
    """Return whether an optimizer counts steps per parameter, as only torch's Adam does."""
    import torch
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE and all(
        isinstance(one, (torch.optim.Adam, torch.optim.AdamW))
        for one in stepping(optimizer.optimizer)
    )


def is_hybrid(inner: Any) -> bool:
    """Return whether a torch optimizer is Megatron's that steps on the host, at any fraction."""
    return hasattr(inner, "param_to_inner_param")


def mark_part(parameter: Any, dimension: int) -> None:
    """Mark a parameter as this rank's part along a dimension, as Megatron's own layers do.

    Of parameters that are not marked the gradient norm counts those of the first rank alone.
    """
    parameter.tensor_model_parallel = True
    parameter.partition_dim = dimension
    parameter.partition_stride = 1


def stepping(inner: Any) -> list[Any]:
    """Return the torch optimizers that step: those inside of a hybrid one, or the one itself."""
    return list(inner.sub_optimizers) if is_hybrid(inner) else [inner]


def renew_copies(hybrid: Any, *, widened: bool = True) -> None:
    """Copy parameters to what a hybrid optimizer steps on instead, on the host or in float32.

    Without `widened` leave out float32 copies of 16-bit parameters, which hold more than these.
    """
    for parameter, inner in hybrid.param_to_inner_param.items():
        if inner is not parameter and (widened or inner.dtype == parameter.dtype):
            inner.data.copy_(parameter.data)


def main_parameters(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's shard of each 16-bit parameter [N], and the float32 one that is stepped.

    Quantized parameters are left out, and Megatron-FSDP, which has main parameters of its own.
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
                        continue  # it is made in the first step, or has only what 16 bits lack
                held = part._get_model_param_range_map(model)["param"]
                yield model.detach().view(-1)[held.start : held.end], main.detach().view(-1)
        elif hasattr(part, "fp32_from_float16_groups"):
            models, mains = (
                chain.from_iterable(getattr(part, name))
                for name in ("float16_groups", "fp32_from_float16_groups")
            )
            for model, main in zip(models, mains, strict=True):
                yield model.detach().view(-1), main.detach().view(-1)


#: Lists of one optimizer: the model's parameters, what it steps for each, and what if that is None.
_STEPPED = (
    ("model_float16_groups", "shard_fp32_from_float16_groups", "shard_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
    ("float16_groups", "fp32_from_float16_groups"),
    ("fp32_from_fp32_groups", "fp32_from_fp32_groups"),
)


def stepped(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the model's parameters that one optimizer updates on this rank, and what it steps.

    Those of a kind that is not Megatron's own are not known, nor Megatron-FSDP's: none is yielded.
    """
    for names in _STEPPED:
        lists = (chain.from_iterable(getattr(optimizer, name, ())) for name in names)
        for model, main, *shard in zip(*lists, strict=True):
            yield model, shard[0] if shard and main is None else main
    if type(optimizer).__name__ == "FP32Optimizer" and optimizer.optimizer is not None:
        for group in optimizer.optimizer.param_groups:
            yield from ((each, each) for each in group["params"])


def start_in(optimizer: Any, model: Any) -> int:
    """Return where what one optimizer steps begins in a parameter of the model."""
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
    """Return what one optimizer steps for parameters that are frozen now."""
    found = [main for model, main in stepped(optimizer) if not model.requires_grad]
    if in_fsdp(optimizer) and optimizer.optimizer is not None:
        for group in optimizer.optimizer.param_groups:
            for each in group["params"]:
                # Megatron-FSDP puts now the shard into the module, now the whole parameter.
                whole = getattr(each, "orig_param", each)
                if not (each.requires_grad and whole.requires_grad):
                    found.append(each)
    return found


def leave_out(inner: Any, mains: Iterable[Any]) -> None:
    """Take the gradients of tensors away that a torch optimizer would step."""
    for main in mains:
        main.grad = None
        if hasattr(main, "decoupled_grad"):
            main.decoupled_grad = None
        if is_hybrid(inner):  # it leaves the gradient of an earlier step where it is
            copy = inner.param_to_inner_param[main]
            copy.grad = None
            inner.cpu_copy_map_grad.pop(copy, None)


def count_step(inner: Any, mains: Iterable[Any]) -> None:
    """Count a step for tensors that were left out of it; Megatron saves one count for all.

    One that was never stepped gets the state that others have, with moments of zero.
    """
    import torch

    copies = {inner.param_to_inner_param[each] if is_hybrid(inner) else each for each in mains}
    known = chain.from_iterable(one.state.items() for one in stepping(inner))
    stepped = [(key, state) for key, state in known if state and key not in copies]
    if not stepped:
        return
    like, others = stepped[0]
    for one in stepping(inner):
        for copy in (each for group in one.param_groups for each in group["params"]):
            if copy not in copies:
                continue
            state = one.state[copy]
            for key, value in () if state else others.items():
                moments = torch.is_tensor(value) and value.shape == like.shape
                state[key] = torch.zeros_like(copy, dtype=value.dtype) if moments else value
            if "step" in state:
                state["step"] = others["step"].clone()
    if is_hybrid(inner):
        inner._sync_sub_optimizers_state_to_hdo()


def outdated(model: Tensor, main: Tensor) -> tuple[Tensor, Tensor]:
    """Return where a main parameter does not round to the model's, and that where the main one is.

    A step leaves no such element: weights were written into the model afterwards.
    """
    here = model if main.is_cuda else model.cpu()
    return main.to(here.dtype).ne(here).logical_and_(~here.isnan()), here


def count_outdated(optimizer: Any, device: Any) -> Tensor:
    """Return the number of such elements of this rank as a float64 scalar; nothing waits for it."""
    import torch

    found = torch.zeros((), dtype=torch.float64, device=device)
    for model, main in main_parameters(optimizer):
        found += outdated(model, main)[0].sum().to(device, non_blocking=True)
    return found


SCALED = "_megatron_idempotent_scaled_by_caller"


OURS = "_megatron_idempotent_scaling"


class LossScale:
    """Calls `optimizer.scale_loss`, and does not keep alive, copy or pickle the optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Any:
        """The optimizer; None if it no longer exists."""
        return self._optimizer()

    def __call__(self, loss: Tensor) -> Tensor:
        """Return `loss`, of any shape, times the optimizer's current loss scale.

        Return it as it is if the optimizer is gone, or if the caller has scaled by hand.
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
        # Another process has no such optimizer; None is what upstream's config starts with.
        return type(None), ()


def trained_by(optimizer: Any) -> list[Any]:
    """Return the model's parameters that an optimizer, or a chain of them, updates on this rank."""
    return [model for part in unchained(optimizer) for model, _ in stepped(part)]


def unchained(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chain, and of chains in it, else the one; none of None."""
    if not hasattr(optimizer, "chained_optimizers"):
        return [] if optimizer is None else [optimizer]
    return [one for part in optimizer.chained_optimizers for one in unchained(part)]


def grad_scalers(optimizer: Any) -> list[Any]:
    """Return the scalers of the losses of an optimizer, or of those in a chain that have one."""
    found = [getattr(one, "grad_scaler", None) for one in unchained(optimizer)]
    return [each for each in found if each is not None]


def parts(optimizer: Any) -> list[Any]:
    """Return the optimizer and, if it is a chain, the optimizers in it."""
    return [optimizer, *getattr(optimizer, "chained_optimizers", ())]
