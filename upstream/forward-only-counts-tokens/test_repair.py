import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import get_submodules
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestTokensOfExpertBias:
    def setup_method(self, method):
        Utils.initialize_model_parallel(1, 1)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=12,
            num_attention_heads=4,
            num_moe_experts=4,
            moe_router_topk=2,
            moe_router_load_balancing_type="none",
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            use_cpu_initialization=True,
            add_bias_linear=False,
        )
        submodules = get_submodules(
            get_gpt_layer_local_submodules(num_experts=4, moe_grouped_gemm=False).mlp
        )
        self.router = MoELayer(config, submodules).cuda().router
        self.hidden_states = torch.randn(8, 2, 12).cuda()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def counted(self):
        self.router(self.hidden_states)
        return self.router.local_tokens_per_expert.sum().item()

    def test_counted_in_training_mode_only(self):
        self.router.eval()
        assert self.counted() == 0
        self.router.train()
        with torch.no_grad():
            assert self.counted() == 0
        assert self.counted() == 8 * 2 * 2
