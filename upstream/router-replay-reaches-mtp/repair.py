"""Routers of MTP layers take no part in routing replay."""

from upstream.edits import Repair, before, substitute

_ROUTER = "megatron.core.transformer.moe.router:TopKRouter.__init__"
_FLAG = "self.config.moe_enable_routing_replay"

REPAIR = Repair(
    edits=(
        before(
            _ROUTER,
            "self.router_replay = None",
            "# Engines record no MTP layers, whose numbers are those of decoder layers, too.",
        ),
        substitute(_ROUTER, _FLAG, f"{_FLAG} and not is_mtp_layer"),
    ),
    unit_tests=("transformer/moe/test_router_replay.py",),
    # Its wrapper of this function names nothing that it relies on.
    rereads=("router-replay-of-deleted-models",),
)
