import torch

from megatron.core.inference.utils import InferenceMode, set_decode_expert_padding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import get_submodules
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestPaddingAfterDecode:
    def setup_method(self, method):
        Utils.initialize_model_parallel(1, 1)

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def get_layer(self):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=12,
            num_attention_heads=4,
            num_moe_experts=4,
            moe_router_topk=2,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
            moe_expert_capacity_factor=0.5,
            moe_pad_expert_input_to_capacity=True,
            use_cpu_initialization=True,
            add_bias_linear=False,
        )
        submodules = get_submodules(
            get_gpt_layer_local_submodules(num_experts=4, moe_grouped_gemm=False).mlp
        )
        return MoELayer(config, submodules).cuda()

    def test_training_has_its_own_padding(self):
        hidden_states = torch.randn(8, 2, 12).cuda()
        layer = self.get_layer()
        expected, _ = layer(hidden_states)
        with InferenceMode.active():
            set_decode_expert_padding(layer, True, capacity_factor=2.0)
            decoded, _ = layer(hidden_states)
            set_decode_expert_padding(layer, False)
            prefilled, _ = layer(hidden_states)
        # Neither drops a token, unlike training.
        torch.testing.assert_close(decoded, prefilled)
        assert not torch.equal(decoded, expected)
        output, _ = layer(hidden_states)
        assert torch.equal(output, expected)
        assert layer.token_dispatcher.drop_and_pad
        assert layer.config.moe_expert_capacity_factor == 0.5

    def test_each_model_has_its_own_layers(self):
        layer, other = self.get_layer(), self.get_layer()
        set_decode_expert_padding(layer, False)
        set_decode_expert_padding(other, True, capacity_factor=2.0)
        assert not layer.token_dispatcher.drop_and_pad
        assert other.token_dispatcher.moe_expert_capacity_factor == 2.0
