"""`optimizer.state_dict()` of the distributed optimizer has no moments, and a load restores none.

Symptom:
    A program saves with `optimizer.state_dict()` and `load_state_dict()`, which is right without
    `use_distributed_optimizer`. In the same process, a load restores the groups and the step count,
    but moments and main parameters stay those of later steps: the next step restores the later
    weights. In a new process the moments are uninitialized memory: NaN in the first step, or wrong
    values that go unnoticed. No error.

Cause:
    `state_dict` leaves out all state that depends on the rank, and says so in its docstring.
    `load_state_dict` keeps the live state, or allocates it with `torch.empty` for
    `load_parameter_state` to overwrite. Megatron does not check that this happened.

Affects:
    Every release; by design. What the patch does: a step raises after such a load, unless the state
    was loaded or written after it, or written by hand between the last step and the load. A load at
    the live step count, for example to change only rates, works as before. Save with
    `sharded_state_dict()`, or also call `save_parameter_state()`. Not covered: a save after such a
    load, and Megatron-FSDP, which has a different `state_dict`.

Upstream:
    https://github.com/radixark/miles/pull/2516, open: resumed LoRA runs step into NaN, or overwrite
    the adapter. https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/distrib_optimizer.py,
    `state_dict`.

Remove when:
    `state_dict` has the state of this rank, or a step raises if state was not loaded. By design:
    upstream saves the state apart, and to add it here would take collectives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_idempotent.megatron import optimizers
from megatron_idempotent.patching.weak_keys import PerProcessWeakKeys

from ._case import Fault, Original, Patch, bench, target

if TYPE_CHECKING:
    from weakref import WeakKeyDictionary, ref

    _Writes = list[tuple[ref[Any], int]]
    """Tensors of one parameter's state, and their version counters."""


class _Load(NamedTuple):
    """Describes a load that restored an optimizer's parameter groups, but not its moments."""

    writes: _Writes
    """The state's writes right after the load."""
    found: str
    """The origin of moments and main parameters, as the end of a sentence."""


_stepped: WeakKeyDictionary[Any, _Writes] = PerProcessWeakKeys(__name__, "_stepped")
_bare: WeakKeyDictionary[Any, _Load] = PerProcessWeakKeys(__name__, "_bare")


def load_state_dict(original: Original, self: Any, state_dict: dict[str, Any]) -> None:
    """Run upstream's load; record the load if it restored parameter groups without moments."""
    if "param_state" in state_dict or optimizers.in_fsdp(self) or self.optimizer is None:
        original(self, state_dict)
        _bare.pop(self, None)
        return
    fresh = not self.optimizer.state
    saved, live = _step_of(state_dict["optimizer"]["param_groups"]), _live_step(self.optimizer)
    # The program may have restored moments by hand before it loads the groups.
    by_hand = _writes(self) != _stepped.get(self)
    original(self, state_dict)
    if fresh:
        _note(self, "uninitialized memory")
    elif None not in (saved, live) and saved != live and not by_hand:
        _note(self, f"those of step {live:g}, but the groups are at step {saved:g}")


def step_with_ready_grads(original: Original, self: Any) -> bool:
    """Wrap the update: raise if it would use moments that the last load did not restore."""
    load = _bare.pop(self, None)
    if load is not None and load.writes == _writes(self):
        _bare[self] = load
        raise RuntimeError(
            "the distributed optimizer would step after a load_state_dict() that brought no "
            f"moments and no main parameters: they are {load.found}. Its state_dict() does not "
            "have them. Save sharded_state_dict(), or also call save_parameter_state(), and load "
            "both; to go on without, build a new optimizer"
        )
    updated: bool = original(self)
    _stepped[self] = _writes(self)
    return updated


def _note(optimizer: Any, origin: str) -> None:
    writes = _writes(optimizer)
    if writes:  # a rank may have no part of any parameter
        _bare[optimizer] = _Load(writes, origin)


def _writes(optimizer: Any) -> _Writes:
    """Return weak references to the first parameter's state tensors, with their version counters.
    One parameter is enough, because a load writes the state of all parameters.
    """
    import weakref

    states = () if optimizer.optimizer is None else optimizer.optimizer.state.values()
    state: dict[str, Any] = next(iter(states), {})
    return [
        (weakref.ref(value), value._version)
        for name, value in state.items()
        if name != "step" and hasattr(value, "_version")
    ]


def _live_step(inner: Any) -> float | None:
    """Return the step count that an optimizer has now; None if it has none.
    If parameters or groups have counts of their own, the first count is returned.
    """
    states = (state for state in inner.state.values() if "step" in state)
    state = next(states, None)
    return _step_of(inner.param_groups) if state is None else float(state["step"])


def _step_of(groups: list[dict[str, Any]]) -> float | None:
    counts = [float(group["step"]) for group in groups if group.get("step") is not None]
    return counts[0] if counts else None


def reproduce() -> None:
    """Load a saved `optimizer.state_dict()` into the same optimizer one step later, and into a new
    optimizer; take a step after each load. On stock Megatron the first step uses the moments of the
    step after the save, and the second uninitialized memory; with the patch both raise.
    """
    import copy

    model = _trained()
    state, moments = copy.deepcopy(model.optimizer.state_dict()), _moments(model)
    model.train_step(1, data_seed=1)
    model.optimizer.load_state_dict(copy.deepcopy(state))
    _expect_refused(model, moments, "of the step after")
    fresh = bench(dtype="bf16", overlap_grad_reduce=False)
    fresh.optimizer.load_state_dict(state)
    _expect_refused(fresh, moments, "from uninitialized memory")


def _expect_refused(model: Any, moments: list[Any], which: str) -> None:
    """Raise a `Fault` unless the optimizer has the moments `moments`, or refuses to step.
    `which` says in the error which moments a step has used instead.
    """
    if all(a.equal(b) for a, b in zip(moments, _moments(model), strict=True)):
        return
    try:
        model.train_step(1, data_seed=2)
    except RuntimeError as refusal:
        if "brought no moments" in str(refusal):
            return
        raise
    raise Fault(f"after load_state_dict() a step used moments {which}")


def control() -> object:
    """Run loads that stock Megatron does correctly, as a control.
    Return the bytes of moments and parameters.
    """
    tensors = []
    model = _trained()
    state = model.optimizer.state_dict()
    for part in state if isinstance(state, list) else [state]:
        for group in part["optimizer"]["param_groups"]:
            group["lr"] *= 0.5
    model.optimizer.load_state_dict(state)
    tensors += _moments(model)
    model.train_step(1, data_seed=1)

    model = _trained()
    state, moments = model.optimizer.state_dict(), _moments(model)
    model.train_step(1, data_seed=1)
    fresh = bench(dtype="bf16", overlap_grad_reduce=False)
    for target_model, state_comes_first in ((model, True), (fresh, False)):
        if state_comes_first:
            _put_back(target_model, moments)
        target_model.optimizer.load_state_dict(state)
        if not state_comes_first:
            _put_back(target_model, moments)
        tensors += _moments(target_model)
        target_model.train_step(1, data_seed=1)

    plain = _trained(distributed_optimizer=False)  # its state dict is complete
    state = plain.optimizer.state_dict()
    plain.train_step(1, data_seed=1)
    plain.optimizer.load_state_dict(state)
    plain.train_step(1, data_seed=1)
    # Not the bits after the steps: on stock torch's Adam has one step counter then.
    return [plain.bits(), *(tensor.cpu().numpy().tobytes() for tensor in tensors)]


def _trained(**layout: Any) -> Any:
    model = bench(dtype="bf16", overlap_grad_reduce=False, **layout)
    model.train_step(1, data_seed=0)
    return model


def _state_of(model: Any) -> list[Any]:
    """Return the parameters that a model's optimizers step, followed by their moments."""
    tensors = []
    for part in optimizers.unchained(model.optimizer):
        inner = part.optimizer
        stepped = [param for group in inner.param_groups for param in group["params"]]
        tensors += stepped
        tensors += [inner.state[p][name] for p in stepped for name in ("exp_avg", "exp_avg_sq")]
    return tensors


def _moments(model: Any) -> list[Any]:
    return [tensor.detach().clone() for tensor in _state_of(model)]


def _put_back(model: Any, moments: list[Any]) -> None:
    import torch

    with torch.no_grad():
        for tensor, value in zip(_state_of(model), moments, strict=True):
            tensor.copy_(value)


PATCH = Patch(
    "a load of optimizer.state_dict() leaves moments and main parameters of another step",
    target(
        "distributed.load_state_dict",
        load_state_dict,
        "'param_state' in state_dict",
        "len(self.optimizer.state) == 0",
    ),
    target(
        "distributed.step_with_ready_grads",
        step_with_ready_grads,
        "super().step_with_ready_grads()",
    ),
)
