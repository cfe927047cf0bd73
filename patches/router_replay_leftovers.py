"""Recomputation uses replayed routing of an earlier window.

Symptom:
    With `moe_enable_routing_replay` and activation recomputation, the forward of a training window
    and its recomputation route differently: the recomputation takes the experts of an earlier
    batch, such as one for log-probabilities. Without recomputation, the indices of every microbatch
    stay in memory.

Cause:
    Each set of target indices is appended to `replay_backward_list`, and only recomputation removes
    it, oldest first. A forward-only window, a window without recomputation and one that raises
    leave their indices in the list.

Affects:
    0.16 on. What the patch does: when a schedule ends, even by an exception, it empties the lists
    of its model's routers, because no backward will use them. Target indices and actions stay. Not
    covered: `RouterReplay` lists the routers of all models of the process, so that a second live
    model breaks `set_replay_data` for the first; put another list in its place while you build the
    second model. For deleted models see `router-replay-of-deleted-models`.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/transformer/moe/router_replay.py,
    `set_target_indices`.

Remove when:
    targets are queued only if a backward will recompute. `upstream/router-replay-leftovers` has the
    repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import schedules

from ._case import Fault, Original, Patch, address, schedule_targets


def schedule(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run a schedule, then empty the replay lists of its routers."""
    chunks = schedules.chunks(kwargs["model"])
    if not getattr(schedules.config_of(chunks), "moe_enable_routing_replay", False):
        return original(*args, **kwargs)
    try:
        return original(*args, **kwargs)
    finally:
        for chunk in chunks:
            for module in chunk.modules():
                replay = getattr(module, "router_replay", None)
                if replay is not None:
                    replay.replay_backward_list.clear()


def reproduce() -> None:
    """Compute log-probs with replayed routing, then ask for the routing that recomputation uses.
    On stock Megatron recomputation uses the routing of the log-prob pass.
    """
    import torch
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(experts=4, config_overrides={"moe_enable_routing_replay": True})
    tokens = tiny.BATCH * tiny.SEQUENCE
    routers = RouterReplay.global_router_replay_instances

    def choose(expert: int) -> list[torch.Tensor]:
        return [torch.tensor([[expert, expert + 1]]).repeat(tokens, 1) for _ in routers]

    RouterReplay.set_replay_data(choose(0))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    model.forward_backward(1, data_seed=0, forward_only=True)
    RouterReplay.set_replay_data(choose(2))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    for router in routers:
        _, experts = router.get_replay_topk(torch.rand(tokens, 4), 2)
        if int(experts[0, 0]) != 2:
            raise Fault("recomputation takes the routing of the forward-only window")


PATCH = Patch(
    "recomputation replays the MoE routing of an earlier window",
    *schedule_targets(schedule),
    since="0.16",
    came_with=(address("moe.router:TopKRouter.__init__"), "self.router_replay = RouterReplay()"),
    groups=("abort",),
    ranks=1,
)
