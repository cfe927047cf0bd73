"""The router counts tokens for its expert bias in training mode only."""

from upstream.edits import Repair, substitute

REPAIR = Repair(
    edits=(
        substitute(
            "megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias",
            "self.enable_expert_bias and torch.is_grad_enabled()",
            "self.enable_expert_bias and self.training and torch.is_grad_enabled()",
        ),
    ),
    unit_tests=("transformer/moe/test_routers.py",),
)
