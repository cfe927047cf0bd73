"""A forward-only interleaved schedule leaves the config's synchronization functions alone."""

from upstream.edits import Repair, replace, substitute

_SCHEDULE = (
    "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving"
)

REPAIR = Repair(
    edits=(
        replace(_SCHEDULE, "grad_sync_func, param_sync_func = None, None", ""),
        replace(_SCHEDULE, "if forward_only:\n    grad_sync_func", ""),
        replace(_SCHEDULE, "if forward_only:\n    config.grad_sync_func", ""),
        substitute(
            f"{_SCHEDULE}.forward_step_helper_preprocess",
            "config.param_sync_func is not None:",
            "config.param_sync_func is not None and not forward_only:",
        ),
        substitute(
            _SCHEDULE,
            "config.param_sync_func is not None:",
            "config.param_sync_func is not None and not forward_only:",
        ),
    ),
    unit_tests=("pipeline_parallel/test_schedules.py",),
    ranks=2,
    rereads=(
        # They wrap the schedules, and know each by its text.
        "aux-loss-scale-left-set",
        "decode-padding-left-set",
        "deferred-embedding-leftovers",
        "deferred-embedding-reduced-early",
        "forward-only-counts-tokens",
        "model-never-freed",
        "offload-plan-mislearned",
        "router-replay-leftovers",
        "timers-left-running",
    ),
)
