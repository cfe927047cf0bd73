"""With a padding mask each rank counts an equal share of the tokens, as it does without one."""

from upstream.edits import Repair, after, replace

_COUNT = "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count"

REPAIR = Repair(
    edits=(
        replace(_COUNT, "local_num_tokens = local_tokens_per_expert.sum() / topk", ""),
        after(
            _COUNT,
            "total_num_tokens = global_tokens_per_expert.sum() / topk",
            """
            # The reduction was in place, so the local sum is gone. With an equal share, as
            # below, all tokens have the same weight even if one rank has all the padding.
            local_num_tokens = total_num_tokens / reduce_group.size()
            """,
        ),
    ),
    unit_tests=("transformer/moe/test_aux_loss.py", "transformer/moe/test_routers.py"),
    ranks=2,
)
