"""Routing replay counts the routers of deleted models.

Symptom:
    `ValueError: The number of replay tensors (2) does not match instances (4).` if a process has
    built its model a second time, or if a model builds its decoder twice.
    `RouterReplay.get_recorded_data()` begins with a `None` for each router of the old model, and
    code that uses positions in the list replays the routing into routers that never run.

Cause:
    `RouterReplay.__init__` appends itself to a list of the class, and is never removed.

Affects:
    0.16 on. What the patch does: it remembers the router of each `RouterReplay`. Before routing is
    set or read, it removes those from the list whose router was deleted; if the counts still
    differ, it collects garbage first. Not covered: two live models are both in the list; put
    another list in its place while you build the second.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/2693 (the leak, in review),
    https://github.com/verl-project/verl/pull/7340, https://github.com/radixark/miles/pull/2570

Remove when:
    `RouterReplay` lists its instances weakly, or by model.
    `upstream/router-replay-of-deleted-models` has the repair.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from megatron_idempotent.patching.weak_keys import PerProcessWeakKeys

from ._case import Fault, Original, Patch, address, bench, target

#: RouterReplay → its router, both by weak references.
_routers: PerProcessWeakKeys[Any, weakref.ref[Any]] = PerProcessWeakKeys(__name__, "_routers")


def router(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap a router's constructor: record which router owns the new `RouterReplay`."""
    original(self, *args, **kwargs)
    if getattr(self, "router_replay", None) is not None:  # miles' fork replays by its own manager
        _routers[self.router_replay] = weakref.ref(self)


def _without_deleted() -> list[Any]:
    """Remove the `RouterReplay`s of deleted routers from upstream's list, and return the list."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    listed: list[Any] = RouterReplay.global_router_replay_instances
    # Keep replays of routers that were built before the patch was applied.
    listed[:] = [
        replay for replay in listed if replay not in _routers or _routers[replay]() is not None
    ]
    return listed


def set_data(original: Original, all_layers_topk_indices: Sequence[Any]) -> None:
    """Give each layer's routing to its router's replay; drop replays of deleted models first.
    The drop is skipped if the numbers of layers and replays agree.
    """
    import gc

    if len(all_layers_topk_indices) != len(_without_deleted()):
        gc.collect()
        _without_deleted()
    original(all_layers_topk_indices)


def get_data(original: Original) -> Any:
    """Return the routing that the routers of models that still exist have recorded."""
    _without_deleted()
    return original()


def reproduce() -> None:
    """Build a model with routing replay, delete it, build it again, and set replay data.
    On stock Megatron the number of routers is wrong: the deleted ones count.
    """
    import torch
    from megatron.core.transformer.moe.router_replay import RouterReplay

    def built() -> Any:
        overrides = {"moe_enable_routing_replay": True}
        return bench(experts=4, config_overrides=overrides, with_optimizer=False)

    layers = sum(hasattr(module, "router_replay") for module in built().chunks[0].modules())
    model = built()  # the first is deleted
    RouterReplay.set_replay_data([torch.zeros(4, 2, dtype=torch.long)] * layers)
    routers = [module for module in model.chunks[0].modules() if hasattr(module, "router_replay")]
    if any(router.router_replay.target_topk_idx is None for router in routers):
        raise Fault("a router of the model got no routing")
    if len(RouterReplay.get_recorded_data()) != layers:
        raise Fault("routing of a deleted model is read")


PATCH = Patch(
    "routing replay counts the routers of models that were deleted",
    target("moe.router:TopKRouter.__init__", router),
    target("moe.router_replay:RouterReplay.set_replay_data", set_data),
    target("moe.router_replay:RouterReplay.get_recorded_data", get_data),
    since="0.16",
    came_with=(address("moe.router:TopKRouter.__init__"), "self.router_replay = RouterReplay()"),
    fixed_by=((address("moe.router_replay:RouterReplay.set_replay_data"), "gc.collect()"),),
    ranks=1,
    stock_error=r"ValueError: The number of replay tensors \(\d+\) does not match instances",
)
