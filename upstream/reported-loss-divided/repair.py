"""`forward_step_calc_loss` scales the loss out of place."""

from upstream.edits import Repair, before, substitute

_CALC = "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss"

REPAIR = Repair(
    edits=(
        before(
            _CALC,
            "len(outputs) == 3",
            "# Do not scale in place: what loss_func reports may share memory with its loss.",
        ),
        substitute(
            _CALC,
            "output_tensor /= torch.clamp(num_tokens, min=1)",
            "output_tensor = output_tensor / torch.clamp(num_tokens, min=1)",
        ),
        substitute(
            _CALC,
            "output_tensor *= cp_group_size",
            "output_tensor = output_tensor * cp_group_size",
        ),
    ),
    unit_tests=("pipeline_parallel/test_schedules.py", "pipeline_parallel/test_mtp_loss_scale.py"),
)
