"""The replay of a router leaves the list of all replays when the router is deleted."""

from upstream.edits import Repair, after, before, substitute

_REPLAY = "megatron.core.transformer.moe.router_replay"
_ROUTER = "megatron.core.transformer.moe.router"
_UNREGISTER = '''
def unregister(self):
    """Removes this instance from the global list, which others may be iterating over."""
    instances = RouterReplay.global_router_replay_instances
    RouterReplay.global_router_replay_instances = [r for r in instances if r is not self]

'''

REPAIR = Repair(
    edits=(
        before(_ROUTER, "from abc import", "import weakref"),
        after(
            f"{_ROUTER}:TopKRouter.__init__",
            "self.router_replay = RouterReplay()",
            "weakref.finalize(self, self.router_replay.unregister).atexit = False",
        ),
        substitute(_REPLAY, "from enum import Enum", "import gc\nfrom enum import Enum"),
        before(
            f"{_REPLAY}:RouterReplay.set_replay_data",
            "if len(all_layers_topk_indices)",
            """
            if len(all_layers_topk_indices) != len(RouterReplay.global_router_replay_instances):
                gc.collect()  # routers of a deleted model may still be part of reference cycles
            """,
        ),
        before(f"{_REPLAY}:RouterReplay", "def set_target_indices", _UNREGISTER),
    ),
    unit_tests=("transformer/moe/test_router_replay.py",),
)
