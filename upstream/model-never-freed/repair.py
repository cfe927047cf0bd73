"""Dispatchers drop their probabilities at the end, and fp32 shards are detached."""

from upstream.edits import Repair, first, replace

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"

REPAIR = Repair(
    edits=(
        replace(
            "megatron.core.optimizer.distrib_optimizer:"
            "DistributedOptimizer._build_model_and_main_param_groups",
            "shard_model_param = model_param.view(-1)",
            """
            shard_model_param = model_param.detach().view(-1)[
                param_range.start : param_range.end
            ]
            """,
        ),
        first(
            f"{_DISPATCHER}:MoEAllGatherTokenDispatcher.combine_postprocess",
            "self.local_probs = None  # its graph would keep the model alive",
        ),
        first(
            f"{_DISPATCHER}:MoEAlltoAllTokenDispatcher.combine_postprocess",
            "self.probs = None  # its graph would keep the model alive",
        ),
        first(
            f"{_DISPATCHER}:MoEFlexTokenDispatcher.combine_postprocess",
            """
            # Their graph would keep the model alive.
            self._comm_manager.token_probs = self._comm_manager.dispatched_probs = None
            """,
        ),
    ),
    unit_tests=(
        "transformer/moe/test_token_dispatcher.py",
        "transformer/moe/test_moe_layer.py",
        "optimizer/test_distrib_optimizer_grouped_quantized.py",
    ),
)
