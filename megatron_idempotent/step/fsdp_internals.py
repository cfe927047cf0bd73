"""Reaches the parts of torch's FSDP2 that have no public name, and differ between releases.

No code here asks for torch's version. It looks at what this torch has, so that nightlies and
vendors' builds work too.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work

_PACKAGE = "torch.distributed.fsdp._fully_shard"

# By class; "a|b" is one of the two, and "name(2)" a method that takes two arguments beside self.
_NEEDS = {
    "_fully_shard.FSDPModule": (
        "_get_fsdp_state(0)",
        "reshard(0)",
        "set_is_last_backward(1)",
        "set_requires_gradient_sync(1)",
    ),
    "_fsdp_state.FSDPState": (
        "_fsdp_param_groups|_fsdp_param_group",
        "_is_root",
        "_state_ctx",
        "_comm_ctx",
        "_root_post_backward_final_callback(0)",
    ),
    "_fsdp_state.FSDPStateContext": ("is_last_backward",),
    "_fsdp_param_group.FSDPCommContext": ("post_forward_order",),
    "_fsdp_param_group.FSDPParamGroup": (
        "fsdp_params",
        "device",
        "mesh_info",
        "gradient_divide_factor",
        "reduce_grads",
        "all_reduce_grads",
        "_sharded_state",
        "_training_state",
        "_all_gather_result",
        "_post_forward_indices",
    ),
    "_fsdp_common.DataParallelMeshInfo": ("mesh",),
    "_fsdp_param.FSDPParam": (
        "to_sharded(0)",
        "sharded_param",
        "unsharded_accumulated_grad",
        "_unsharded_param",
        "_sharding_spec",
    ),
    "_fsdp_param.ShardedState": ("SHARDED",),
}
# What `reset` needs besides, where torch has no reset of its own.
_RESET_NEEDS = {
    "_fsdp_state.FSDPState": ("_device_handle", "_modules_to_run_forward", "_training_state"),
    "_fsdp_state.FSDPStateContext": (
        "all_states",
        "iter_forward_root",
        "post_backward_final_callback_queued",
    ),
    "_fsdp_param_group.FSDPCommContext": (
        "all_gather_state",
        "reduce_scatter_states|reduce_scatter_state",
    ),
    "_fsdp_param_group.FSDPParamGroup": (
        "_all_reduce_state",
        "_post_reduce_event",
        "_partial_reduce_output",
        "_to_sharded(0)",
    ),
    "_fsdp_param_group.AllGatherState": ("event",),
    "_fsdp_param_group.ReduceScatterState": ("event",),
    "_fsdp_param_group.AllReduceState": ("event",),
    "_fsdp_collectives.AllGatherResult": ("all_gather_event", "all_gather_work"),
    "_fsdp_common.TrainingState": ("IDLE",),
}


def check_internals() -> None:
    """Raise unless this torch's FSDP2 has what a step relies on.

    Raises:
        RuntimeError: names each thing that is missing, and this torch.
    """
    lacking = [*_lacking(_NEEDS), *(() if _resets_itself() else _lacking(_RESET_NEEDS))]
    if lacking:
        raise RuntimeError(
            f"FSDPTrainStep() relies on parts of FSDP2 that torch {torch.__version__} does not "
            f"have: {', '.join(lacking)}. Use a torch from 2.8 to 2.15, on which it is tested, or "
            "a megatron-idempotent that knows this one"
        )


def groups_of(state: Any) -> list[Any]:
    """Returns the parameter groups of a module's state; before torch 2.12 one, or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def mark_sharded(group: Any) -> None:
    """Note in a group that all of its parameters are sharded."""
    group._sharded_state = _found("_fsdp_param.ShardedState").SHARDED


def accumulate(param: Any, grad: Any) -> None:
    """Set what an FSDPParam has accumulated; from torch 2.15 on its unsharded gradient is that."""
    if not isinstance(getattr(type(param), "unsharded_accumulated_grad", None), property):
        param.unsharded_accumulated_grad = grad


def end_backward(root: Any) -> None:
    """Run what FSDP2 runs at the end of a backward on the state of a root, outside of one."""
    shared = root._state_ctx
    # From torch 2.15 on: whether a caller reduces later. The beginning of a backward decides it.
    if hasattr(shared, "manual_backward_finalization_active"):
        shared.manual_backward_finalization_active = False
    root._root_post_backward_final_callback()


def reset(model: Any) -> None:
    """Clear the state that a forward or backward leaves in FSDP2 if it does not end.

    The model is a root that has run before. From 2.13 on torch does it itself. Gradients may be
    dropped or left.
    """
    if _resets_itself():
        model.reset_iter_state()
        return
    root = model._get_fsdp_state()
    shared, talk = root._state_ctx, root._comm_ctx
    groups = [group for state in shared.all_states for group in groups_of(state)]
    # The memory of what is dropped is given away: it has to be done with on the device by then.
    stream = root._device_handle.current_stream()
    for event in _in_flight(talk, groups):
        if event is not None:
            stream.wait_event(event)
    talk.all_gather_state = None
    if hasattr(talk, "reduce_scatter_states"):
        talk.reduce_scatter_states.clear()
    else:
        talk.reduce_scatter_state = None
    talk.post_forward_order.clear()
    idle = _found("_fsdp_common.TrainingState").IDLE
    for group in groups:
        # The event of a reshard stays, because the next gather waits for it.
        group._all_gather_result = group._all_reduce_state = group._post_reduce_event = None
        group._partial_reduce_output = None
        group._post_forward_indices.clear()
        group._training_state = idle
        group._to_sharded()
    for state in shared.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def _in_flight(talk: Any, groups: list[Any]) -> Iterator[Any]:
    """Yields events after which nothing on the device uses what FSDP2 holds for collectives."""
    held = [talk.all_gather_state, *(group._all_reduce_state for group in groups)]
    one = getattr(talk, "reduce_scatter_state", None)
    held += getattr(talk, "reduce_scatter_states", [one])
    for group in groups:
        if (gathered := group._all_gather_result) is not None:
            if isinstance(gathered.all_gather_work, Work):
                gathered.all_gather_work.wait()
            yield gathered.all_gather_event
        yield group._post_reduce_event
    yield from (each.event for each in held if each is not None)


def _resets_itself() -> bool:
    return hasattr(_found("_fully_shard.FSDPModule"), "reset_iter_state")


def _lacking(needs: dict[str, tuple[str, ...]]) -> list[str]:
    lacking = []
    for path, names in needs.items():
        owner = _found(path)
        if owner is None:
            lacking.append(f"{_PACKAGE}.{path}")
            continue
        known = _names(owner)
        lacking += [
            f"{owner.__name__}.{name.replace('|', ' or ').partition('(')[0]}"
            for name in names
            if not any(_has(owner, known, each) for each in name.split("|"))
        ]
    return lacking


def _has(owner: type, known: set[str], name: str) -> bool:
    name, _, arguments = name.partition("(")
    if name not in known or not arguments:
        return name in known
    try:
        inspect.signature(getattr(owner, name)).bind(*range(1 + int(arguments[:-1])))
    except (TypeError, AttributeError):
        return False
    return True


def _names(owner: type) -> set[str]:
    """Returns the attributes that a class defines or its methods set, some in the first forward."""
    names = set(dir(owner))
    for each in owner.__mro__:
        for method in vars(each).values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is not None:
                names |= {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"}
    return names


def _found(path: str) -> Any:
    """Returns FSDP2's class at "module.name"; None if there is none."""
    module, _, name = path.partition(".")
    try:
        return getattr(import_module(f"{_PACKAGE}.{module}"), name, None)
    except ModuleNotFoundError:
        return None
