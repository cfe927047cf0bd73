"""A schedule that ends gives the auxiliary losses their full weight again."""

from upstream.edits import Repair, before

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"

REPAIR = Repair(
    edits=(
        before(
            _SCHEDULES,
            "def forward_backward_no_pipelining(",
            '''
            def _reset_aux_loss_scales(config):
                """Let auxiliary losses count fully in a backward pass outside of a schedule."""
                from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

                if getattr(config, 'num_moe_experts', None) is not None:
                    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device="cuda"))
                if getattr(config, 'mtp_num_layers', None) is not None:
                    MTPLossAutoScaler.set_loss_scale(torch.ones(1, device="cuda"))
                loss_scale_func = _get_experimental_attention_variant_loss_scale_func(config)
                if loss_scale_func is not None:
                    loss_scale_func(torch.ones(1, device="cuda"))


            ''',
        ),
        *(
            before(
                f"{_SCHEDULES}:forward_backward_{schedule}",
                "return forward_data_store",
                "_reset_aux_loss_scales(config)\n",
            )
            for schedule in (
                "no_pipelining",
                "pipelining_with_interleaving",
                "pipelining_without_interleaving",
            )
        ),
    ),
    unit_tests=("pipeline_parallel/test_schedules.py", "pipeline_parallel/test_mtp_loss_scale.py"),
    ranks=2,
    rereads=(
        # They wrap the schedules, and know each by its text.
        "decode-padding-left-set",
        "deferred-embedding-leftovers",
        "deferred-embedding-reduced-early",
        "forward-only-counts-tokens",
        "interleaved-sync-funcs-lost",
        "model-never-freed",
        "offload-plan-mislearned",
        "router-replay-leftovers",
        "timers-left-running",
    ),
    leaves="a schedule that raises leaves the scale set",
)
