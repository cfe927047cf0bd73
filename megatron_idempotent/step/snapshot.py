"""Keeps and restores what a step changes apart from gradients and parameters.

Each `keep_` function copies some state, and returns a function that puts it back. Megatron is
imported only where its state is kept, because steps on FSDP2 do without it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_idempotent.megatron import moe
from megatron_idempotent.megatron.ddp import bucket_groups
from megatron_idempotent.megatron.optimizers import grad_scalers, unchained
from megatron_idempotent.window.open_contexts import close_contexts

Restore = Callable[[], None]
"""Restores the state that a `keep_` function has copied; may be called again."""


def switch_to_training(models: Iterable[nn.Module], modules: Iterable[nn.Module]) -> None:
    """Call `train()` of all `models` if one of their modules is in eval mode, such as the model
    inside of DDP after an evaluation.

    Args:
        models: the models, for example a rank's chunks.
        modules: all modules in them, listed once, because a walk through a model is slow.
    """
    if not all(module.training for module in modules):
        for model in models:
            model.train()


def keep_modules(modules: Iterable[nn.Module]) -> Restore:
    """Copy training modes and buffers of these modules, but not of modules inside of them.
    Return a function that puts both back; it writes buffers in place.
    """
    modes = [(module, module.training) for module in modules]
    # Not module.buffers(): Megatron's DDP has a list of that name, and it would walk once more.
    by_id = {id(b): b for module, _ in modes for b in module._buffers.values() if b is not None}
    buffers = [(buffer, buffer.clone()) for buffer in by_id.values()]

    def restore() -> None:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)

    return restore


def keep_torch() -> Restore:
    """Copy torch's random states on host and device, and whether gradients are recorded.
    Return a function that puts them back.

    The states of Python and NumPy belong to the caller, who may draw numbers while a step is open.
    """
    host = torch.get_rng_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    # An exception inside of `no_grad`'s own exit leaves it off.
    records_gradients = torch.is_grad_enabled()

    def restore() -> None:
        torch.set_grad_enabled(records_gradients)
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device)

    return restore


def keep_values(values: Mapping[str, Any], put: Callable[[str, Any], None]) -> Restore:
    """Copy values and tensors by name, and return a function that puts the copies back.
    Calling `put(name, value)` sets one of them.

    Tensors are put back in place, because captured graphs and aliases hold their memory.
    """
    copies = {name: (value, _copied(value)) for name, value in values.items()}

    def restore() -> None:
        for name, (value, copied) in copies.items():
            if isinstance(value, Tensor):
                with torch.no_grad():
                    value.copy_(copied)
            put(name, value if isinstance(value, Tensor) else copy.copy(copied))

    return restore


def keep_attributes(owner: Any, names: Iterable[str] | None = None) -> Restore:
    """Copy the plain values and tensors among an object's attributes, and return a function that
    puts them back.
    """
    values = vars(owner) if names is None else {name: getattr(owner, name) for name in names}
    plain = (Tensor, bool, int, float, str, list, tuple, type(None))
    plain_values = {name: value for name, value in values.items() if isinstance(value, plain)}
    return keep_values(plain_values, partial(setattr, owner))


def check_scheduler(step: Any, remedy: str, *needed: str) -> None:
    """Raise `ValueError` if the step's scheduler lacks one of the `needed` attributes (methods, or
    `__dict__`), without which `abort()` could not restore it.
    """
    scheduler = step.scheduler
    is_class = isinstance(scheduler, type)  # whose methods want an object
    values = {name: None if is_class else getattr(scheduler, name, None) for name in needed}
    missing_names = [
        n for n, value in values.items() if not (callable(value) or isinstance(value, dict))
    ]
    if scheduler is not None and missing_names:
        raise ValueError(
            f"{type(step).__name__}() got {scheduler!r} as scheduler, without "
            f"{', '.join(missing_names)}: abort() could not put it back; {remedy}"
        )


def keep_functions(owner: Any, names: Sequence[str]) -> Restore:
    """Record an object's own attributes among `names`, such as replaced methods.
    Return a function that puts them back.

    Functions that the object did not have then are removed from it, so that its class's functions
    are found again.
    """
    overrides = {name: vars(owner)[name] for name in names if name in vars(owner)}

    def restore() -> None:
        for name in names:
            if name in overrides:
                setattr(owner, name, overrides[name])
            else:
                vars(owner).pop(name, None)

    return restore


class Writes(NamedTuple):
    """Holds torch's version counters of gradients and of parameters, which count writes in place,
    except through `.data`.

    A counter is -1 for a tensor that is missing. An offload keeps the counters, or resets them to
    0.
    """

    gradients: tuple[int, ...]
    parameters: tuple[int, ...]
    reducing: int | None = None
    """None, or, if gloo may be writing reduced gradients meanwhile, the number of gradients that
    the reductions in flight are of."""

    def since(self, earlier: Writes) -> tuple[int, int]:
        """Return how many gradients and how many parameters were written since `earlier` was read.
        Tensors that were dropped count, too.

        If reductions were in flight then, the end of each counts as a write, at any time. Only
        gradients that were zeroed since count in that case.
        """
        gradients, parameters = (
            sum(new > old or new < 0 <= old for new, old in zip(*pair, strict=True))
            for pair in (
                (self.gradients, earlier.gradients),
                (self.parameters, earlier.parameters),
            )
        )
        if earlier.reducing is not None:
            gradients = int(self.reducing != earlier.reducing)
        return gradients, parameters


def refuse_update(optimizer: Any) -> Restore:
    """Make an optimizer's `step()` raise until the function that this returns is called."""
    restore = keep_functions(optimizer, ["step"])
    optimizer.step = partial(_refused, type(optimizer).__name__)
    return restore


def _refused(name: str, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        f"{name}.step() was called while a step is open, which updates once, in finish(): this "
        "call would update by gradients that are not reduced. Nothing was updated; leave the call "
        "out, or finish() or abort() the step first"
    )


def keep_groups(groups: Iterable[dict[str, Any]]) -> list[Restore]:
    """Copy the settings of each parameter group, such as `lr`; return a function for each group
    that puts them back.
    """
    return [
        keep_values({n: v for n, v in group.items() if n != "params"}, group.__setitem__)
        for group in groups
    ]


_MOE = "megatron.core.transformer.moe"
# Functions of a config that each call of a step replaces. They are restored when the call ends,
# unless a second exception interrupts that.
_CONFIG_FUNCTIONS = (
    "finalize_model_grads_func",
    "grad_scale_func",
    "grad_sync_func",
    "no_sync_func",
    "param_sync_func",
)
_OPTIMIZER_METHODS = ("step_with_ready_grads", "get_grad_norm", "clip_grad_norm")
_BUCKET_METHODS = ("start_grad_sync", "start_param_sync", "register_grad_ready", "check_grads")


def keep_megatron(
    chunks: list[Any], optimizer: Any = None, scheduler: Any = None, *, auxiliary: bool = True
) -> list[Restore]:
    """Copy what a step changes apart from modules, gradients, parameters and the optimizer's state,
    such as random states, config functions and the scheduler; with `auxiliary` also logs and scales
    of auxiliary losses.

    Return functions that put the copies back.
    """
    from megatron.core.pipeline_parallel import schedules

    from megatron_idempotent.window.accumulation import configs_of

    # What patches put around methods of bucket groups is put back too.
    groups = [group for chunk in chunks for group in bucket_groups(chunk)]
    copies = [
        keep_torch(),
        keep_tracker(),
        *(keep_functions(config, _CONFIG_FUNCTIONS) for config in configs_of(chunks)),
        keep_functions(schedules, ("backward_step", "forward_step", "forward_step_calc_loss")),
        *(keep_functions(group, _BUCKET_METHODS) for group in groups),
    ]
    if auxiliary:
        scales = (keep_attributes(s, ["main_loss_backward_scale"]) for s in moe.scalers())
        copies += [keep_logs(), *scales]
    if optimizer is not None:
        copies.append(keep_functions(optimizer, _OPTIMIZER_METHODS))
    copies += [keep_attributes(scaler) for scaler in grad_scalers(optimizer)]
    for part in unchained(optimizer):
        if getattr(part, "optimizer", None) is not None:
            copies += keep_groups(part.optimizer.param_groups)
    if scheduler is not None:
        copies.append(keep_attributes(scheduler))
    return copies


def keep_tracker() -> Restore:
    """Copy the states of Megatron's RNG tracker, which dropout uses; return a function that puts
    them back.
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker as tracker

    def copied(states: dict[str, Any]) -> dict[str, Any]:
        return {n: s.clone() if isinstance(s, Tensor) else s for n, s in states.items()}

    states = copied(tracker().get_states())
    # The current state's name, which an interrupted fork leaves wrong; Transformer Engine's tracker
    # has none.
    current = vars(tracker()).get("_current_state_name")

    def restore() -> None:
        tracker().set_states(copied(states))
        if current is not None:
            tracker()._current_state_name = current

    return restore


def keep_logs() -> Restore:
    """Copy the totals that MoE, MTP and DSA layers log, and return a function that puts them back
    and zeroes totals that came later.
    """
    totals = {id(value): (value, value.clone()) for value in logged()}

    def restore() -> None:
        for value in logged():
            _, total = totals.get(id(value), (None, None))
            value.zero_() if total is None else value.copy_(total)

    return restore


def logged() -> Iterator[Tensor]:
    """Yield the tensors in which MoE, MTP and DSA layers log their losses."""
    logging = sys.modules.get(f"{_MOE}.moe_logging")
    if logging is not None:  # from 0.18 on
        yield from (entry.values for entry in logging.get_moe_metrics_tracker().metrics.values())
    elif f"{_MOE}.moe_utils" in sys.modules:
        yield from (entry["values"] for entry in moe.legacy_metrics().values())
    yield from moe.layer_logs()


def keep_update(parameters: Iterable[Tensor], optimizers: Sequence[Any]) -> Restore:
    """Copy parameters and optimizer state to the host, before an update, and return a function that
    puts them back.

    A copy costs memory on the host and time in each step, so a step makes it only with `undo=True`.
    The copies are put back in place, and state that the update has created is deleted.
    """
    main = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    # Without a half precision they are the model's own.
    parameters_by_id = {id(p): p for p in (*parameters, *main)}
    values = [(p, p.detach().to("cpu", copy=True)) for p in parameters_by_id.values()]

    def on_host(value: Any) -> Any:
        is_tensor = isinstance(value, Tensor)
        return value.detach().to("cpu", copy=True) if is_tensor else _copied(value)

    copies = [
        (o, {p: {n: on_host(v) for n, v in state.items()} for p, state in o.state.items()})
        for o in optimizers
    ]

    @torch.no_grad()
    def restore() -> None:
        for parameter, value in values:
            parameter.copy_(value)
        for optimizer, states in copies:
            for parameter in [
                parameter for parameter in optimizer.state if parameter not in states
            ]:
                del optimizer.state[parameter]
            for parameter, saved in states.items():
                state = optimizer.state[parameter]
                for name in [name for name in state if name not in saved]:
                    del state[name]
                for name, value in saved.items():
                    if isinstance(state.get(name), Tensor) and isinstance(value, Tensor):
                        state[name].copy_(value)
                    else:
                        state[name] = _copied(value)

    return restore


class OpenUpdate:
    """Makes optimizers refuse `step()` while a training step is open.
    Only the step's own update is allowed, and this object tracks how far that update has come.
    """

    def __init__(self, *, undo: bool) -> None:
        self.begun = False
        """True once parameters may have been changed."""
        self.undo: Restore | None = None
        """Restores the state from before the update; None without a copy, or before the update."""
        self._keeps_copy = undo
        self._allow: list[Restore] = []

    @property
    def is_torn(self) -> bool:
        """True if parameters may be half updated, and no copy of them can be restored."""
        return self.begun and self.undo is None

    def open(self, optimizers: Iterable[Any]) -> None:
        """Make these optimizers' `step()` raise until `reset`, because a step begins."""
        self.reset()
        self._allow = [refuse_update(part) for part in optimizers if part is not None]

    def begin(self, parameters: Iterable[Tensor], optimizers: Sequence[Any]) -> None:
        """Note that the step's own update begins.
        If the step can be undone, first copy parameters and optimizer state.
        """
        if self._keeps_copy:
            self.undo = keep_update(parameters, optimizers)
        self.begun = True

    def reset(self) -> None:
        """Forget the last step's update and its copy, and let the optimizers step again."""
        self.begun, self.undo = False, None
        while self._allow:
            self._allow.pop()()


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run a block with modules in eval mode, without gradients.
    Afterwards restore training modes, buffers and random states.
    """
    restore_modules = keep_modules(inner for module in modules for inner in module.modules())
    restore_torch = keep_torch()
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    except BaseException as error:
        close_contexts(error)  # they must restore their state before it is restored here, not after
        raise
    finally:
        restore_modules()
        restore_torch()


def sum_of_norms(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of the tensors' 2-norms, float64; it is finite only if all elements are."""
    by_kind: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        # Quantized parameters are no plain tensors, and have no NaN of their own.
        is_plain = type(tensor) in (Tensor, nn.Parameter)
        if is_plain and tensor.is_floating_point() and tensor.numel():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    norms = [torch.nn.utils.get_total_norm(group).double() for group in by_kind.values()]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([norm.to(norms[0].device) for norm in norms]).sum()


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Describe the first NaN or infinite element of the named tensors; None if all are finite.
    Waits for the device.
    """
    for name, value in tensors:
        wrong = ~value.detach().isfinite()
        if wrong.any():
            index = wrong.nonzero()[0].tolist()
            return (
                f"its parameter {name!r} is {value.detach()[tuple(index)].item()} at {index}: load "
                "a checkpoint on all ranks"
            )
    return None


def refuse_other_learning_rates(optimizer: Any) -> None:
    """Raise if a parameter group does not follow the optimizer's common learning rate.

    Raises:
        ValueError: a group has another rate, which one number for all groups would overwrite.
    """
    for index, group in enumerate(getattr(optimizer, "param_groups", ())):
        if _has_own_schedule(group):
            raise ValueError(
                f"finish(lr=…) sets one learning rate, and parameter group {index} has its own "
                f"(max_lr={group.get('max_lr')}), by --decoupled-lr, MuP or an override: set "
                "each group's 'lr' before finish(), and give no lr there"
            )


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set the learning rate of all groups, times their `lr_mult`."""
    for group in getattr(optimizer, "param_groups", ()):
        group_lr = lr * group.get("lr_mult", 1.0)
        if isinstance(group.get("lr"), Tensor):  # a captured graph reads it there
            group["lr"].fill_(group_lr)
        else:
            group["lr"] = group_lr


def lr_and_weight_decay(optimizer: Any) -> tuple[float, float] | None:
    """Return learning rate and weight decay of the first group that follows the common schedule,
    with multipliers of 1 if there is one, or else of the first group; None without groups.

    Before 0.14 the optimizer of a pipeline stage with only frozen parameters has no groups.
    """

    def exceptions(group: Mapping[str, Any]) -> tuple[bool, ...]:
        multipliers = (group.get("lr_mult", 1.0), group.get("wd_mult", 1.0))
        return _has_own_schedule(group), *(multiplier != 1.0 for multiplier in multipliers)

    group = min(getattr(optimizer, "param_groups", ()), key=exceptions, default=None)
    if group is None:
        return None
    return float(group.get("lr", 0.0)), float(group.get("weight_decay", 0.0))


def _has_own_schedule(group: Mapping[str, Any]) -> bool:
    """Return whether an override or `--decoupled-lr` gave a parameter group its learning rate."""
    return group.get("is_decoupled_lr", False) or not group.get("default_config", True)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
