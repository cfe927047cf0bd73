"""The scaler of MoE losses keeps a tensor of its own, and copies scales of any shape into it."""

from upstream.edits import Repair, substitute, wrap

_SET = "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler.set_loss_scale"
_KEPT = "MoEAuxLossAutoScaler.main_loss_backward_scale"
_COPY = f"""{_KEPT}.copy_(
                scale.view_as({_KEPT})
            )"""

REPAIR = Repair(
    edits=(
        wrap(
            _SET,
            f"{_KEPT} = scale",
            "with torch.inference_mode(False):  # training copies other scales into it",
        ),
        substitute(_SET, f"{_KEPT} = scale", f"{_KEPT} = scale.clone()"),
        # A direct backward keeps a tensor without dimensions.
        substitute(_SET, f"{_KEPT}.copy_(scale)", _COPY),
    ),
    unit_tests=("transformer/moe/test_aux_loss.py", "pipeline_parallel/test_schedules.py"),
)
