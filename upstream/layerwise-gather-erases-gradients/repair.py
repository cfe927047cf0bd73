"""The layer-wise optimizer's gather has a receive buffer of its own."""

from upstream.edits import Repair, replace

GROUP = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"

REPAIR = Repair(
    edits=(
        replace(
            f"{GROUP}.start_param_sync",
            "reuse_buf = bucket.grad_data.view(param_dtype)",
            """
            # Not grad_data: a forward pass may gather while gradients wait for their step.
            recv_buf = torch.empty(
                total_gather_size, dtype=param_dtype, device=bucket.grad_data.device
            )
            """,
        ),
        replace(f"{GROUP}.start_param_sync", "assert reuse_buf.numel() >= total_gather_size", ""),
        replace(
            f"{GROUP}.start_param_sync",
            "gather_list.append(reuse_buf[offset : offset + size])",
            "gather_list.append(recv_buf[offset : offset + size])",
        ),
        replace(f"{GROUP}.start_param_sync", "bucket.grad_data.zero_()", ""),
        replace(f"{GROUP}.finish_param_sync", "bucket.grad_data.zero_()", ""),
    ),
    unit_tests=("test_layer_wise_optimizer.py", "distributed/test_param_and_grad_buffer.py"),
    ranks=2,
    # They know this function by its hash.
    rereads=(
        "checkpoint-before-gather",
        "layerwise-params-stale-after-step",
        "params-stale-after-step",
        "pending-gather-dropped",
        "start-param-sync-reentry",
    ),
)
