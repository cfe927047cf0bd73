"""The MTP loss is weighed by the tokens that all context-parallel ranks count."""

from upstream.edits import Repair, after, before, substitute

_LOSS = "megatron.core.transformer.multi_token_prediction:process_mtp_loss"

REPAIR = Repair(
    edits=(
        after(
            _LOSS,
            "original_num_tokens = loss_mask.sum()",
            """
            cp_size = cp_group.size() if cp_group is not None else 1
            if cp_size > 1:
                # Rolling moves tokens between CP ranks, so only the counts of all of them agree.
                torch.distributed.all_reduce(original_num_tokens, group=cp_group)
            """,
        ),
        before(
            _LOSS,
            "mtp_loss_scale = config.mtp_loss_scaling_factor",
            """
            if cp_size > 1:
                torch.distributed.all_reduce(num_tokens, group=cp_group)
                if not config.calculate_per_token_loss:
                    mtp_loss = mtp_loss * cp_size  # DDP averages over CP ranks
            """,
        ),
        substitute(_LOSS, "uses local counts", "uses counts of one DP rank"),
        substitute(_LOSS, "across DP/CP ranks", "across DP ranks"),
    ),
    unit_tests=("transformer/test_multi_token_prediction.py",),
    ranks=2,
)
