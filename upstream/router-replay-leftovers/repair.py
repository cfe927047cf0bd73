"""A schedule that ends drops the replayed routing that was kept for recomputation."""

from upstream.edits import Repair, before, substitute

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"

REPAIR = Repair(
    edits=(
        before(
            "megatron.core.transformer.moe.router_replay:RouterReplay",
            "def clear_global_router_replay_action(",
            '''
            @staticmethod
            def clear_global_backward_indices():
                """Clears the topk indices that are kept for re-compute in all instances."""
                for router in RouterReplay.global_router_replay_instances:
                    router.replay_backward_list = []

            ''',
        ),
        substitute(
            _SCHEDULES,
            "from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler",
            "from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler\n"
            "from megatron.core.transformer.moe.router_replay import RouterReplay",
        ),
        *(
            before(
                f"{_SCHEDULES}:forward_backward_{schedule}",
                "return forward_data_store",
                """
                if getattr(config, 'moe_enable_routing_replay', False):
                    RouterReplay.clear_global_backward_indices()

                """,
            )
            for schedule in (
                "no_pipelining",
                "pipelining_with_interleaving",
                "pipelining_without_interleaving",
            )
        ),
    ),
    unit_tests=("pipeline_parallel/test_schedules.py", "transformer/moe/test_router_replay.py"),
    ranks=2,
    rereads=(
        # They wrap the schedules, and know each by its text.
        "aux-loss-scale-left-set",
        "decode-padding-left-set",
        "deferred-embedding-leftovers",
        "deferred-embedding-reduced-early",
        "forward-only-counts-tokens",
        "interleaved-sync-funcs-lost",
        "model-never-freed",
        "offload-plan-mislearned",
        "timers-left-running",
    ),
    leaves="a schedule that raises leaves its lists",
)
