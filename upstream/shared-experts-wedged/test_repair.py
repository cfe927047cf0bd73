import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import get_submodules
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestOverlappedSharedExpertsAfterException:
    def setup_method(self, method):
        Utils.initialize_model_parallel(1, 1)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=4,
            num_moe_experts=4,
            moe_router_topk=2,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
            moe_shared_expert_intermediate_size=16,
            moe_shared_expert_overlap=True,
            use_cpu_initialization=True,
            add_bias_linear=False,
        )
        submodules = get_submodules(
            get_gpt_layer_local_submodules(num_experts=4, moe_grouped_gemm=False).mlp
        )
        self.layer = MoELayer(config, submodules).cuda()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    @pytest.mark.parametrize(
        "piece", ["linear_fc1_forward_and_act", "linear_fc2_forward", "get_output"]
    )
    def test_next_forward(self, piece, monkeypatch):
        def fail(*args):
            raise ValueError("interrupted")

        hidden_states = torch.randn(8, 2, 16).cuda()
        expected, _ = self.layer(hidden_states)
        with monkeypatch.context() as patched, pytest.raises(ValueError, match="interrupted"):
            patched.setattr(self.layer.shared_experts, piece, fail)
            self.layer(hidden_states + 1.0)
        output, _ = self.layer(hidden_states)
        assert torch.equal(output, expected)

    def test_order_is_still_checked(self):
        with pytest.raises(AssertionError, match="linear_fc2_forward must be called from"):
            self.layer.shared_experts.linear_fc2_forward()
