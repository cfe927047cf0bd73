"""Under router replay an MTP layer is routed like a layer of the decoder.

Symptom:
    With `moe_enable_routing_replay`, experts and multi-token prediction (MTP), replaying an
    engine's routing gives the MTP router the experts of the decoder's first layer, if code matches
    layers by `layer_number`, as NeMo-RL does. The MTP loss silently trains on wrong experts. Code
    that uses the list raises `The number of replay tensors (2) does not match instances (3)`, or
    ends in `'NoneType' object has no attribute 'to'`. Routing recorded in inference, which runs no
    MTP layer, ends with a `None`.

Cause:
    Each router creates a `RouterReplay`, including an MTP layer's, which from 0.17 on numbers its
    layers from 1 like the decoder. Engines do not record MTP layers.

Affects:
    0.16 on. What the patch does: routers of MTP layers have no `RouterReplay`, and choose experts
    themselves. So recorded and replayed routing is that of the decoder, in the order of its layers.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/7404 (in review),
    https://github.com/NVIDIA-NeMo/RL/pull/3903, https://github.com/verl-project/verl/pull/7106

Remove when:
    routers of MTP layers stay out of replay. `upstream/router-replay-reaches-mtp` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, address, target


def build(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Build an MTP layer, and remove its routers from Megatron's router replay."""
    original(self, *args, **kwargs)
    for module in self.modules():
        replay = getattr(module, "router_replay", None)
        if replay is not None:
            type(replay).global_router_replay_instances.remove(replay)
            module.router_replay = None


def reproduce() -> None:
    """Replay routing of the decoder's two layers in a model with an MTP layer.
    On stock Megatron the MTP layer takes the routing of the first decoder layer.
    """
    import torch
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(
        experts=4,
        config_overrides={"moe_enable_routing_replay": True, "mtp_num_layers": 1},
        with_optimizer=False,
    )
    tokens = tiny.BATCH * tiny.SEQUENCE
    recorded = [torch.tensor([[layer, 3]]).repeat(tokens, 1) for layer in range(2)]
    for module in model.chunks[0].modules():
        replay = getattr(module, "router_replay", None)
        if replay is not None and module.layer_number <= len(recorded):
            replay.set_target_indices(recorded[module.layer_number - 1])
    routings = []

    def record(router: Any, args: Any, output: Any) -> None:
        routings.append(output[1])

    routers = [module for module in model.chunks[0].modules() if hasattr(module, "router_replay")]
    routers[-1].register_forward_hook(record)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    model.forward_backward(1, data_seed=0)
    if routings[0][:, [0, 3]].all():
        raise Fault("the MTP layer is routed like the decoder's first layer")
    RouterReplay.set_replay_data(recorded)


PATCH = Patch(
    "under router replay an MTP layer takes the routing of the decoder's first layer",
    target("mtp.MultiTokenPredictionLayer.__init__", build),
    since="0.16",
    came_with=(address("moe.router:TopKRouter.__init__"), "self.router_replay = RouterReplay()"),
    fixed_by=(
        (
            address("moe.router:TopKRouter.__init__"),
            "self.config.moe_enable_routing_replay and not is_mtp_layer",
        ),
    ),
    given=("mtp-without-transformer-engine",),
    ranks=1,
    stock_error="Fault: |AttributeError: 'NoneType' object has no attribute 'to'",
    loudness="both",
)
