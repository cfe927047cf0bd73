import torch

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import get_submodules
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils

SEQUENCE, BATCH, HIDDEN = 16, 2, 32


class TestPaddingMaskOfLaterPipelineStage:
    def setup_method(self, method):
        Utils.initialize_model_parallel(tensor_model_parallel_size=2)
        model_parallel_cuda_manual_seed(123)

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_each_rank_takes_its_part_of_the_mask(self):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=2,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            num_moe_experts=4,
            moe_router_load_balancing_type="none",
            moe_z_loss_coeff=1.0,
            add_bias_linear=False,
            use_cpu_initialization=True,
        )
        submodules = get_submodules(
            get_gpt_layer_local_submodules(num_experts=4, moe_grouped_gemm=False).mlp
        )
        assert isinstance(submodules, MoESubmodules)
        layer = MoELayer(config, submodules, layer_number=1).cuda()
        hidden_states = torch.randn(SEQUENCE // 2, BATCH, HIDDEN, device="cuda")
        # The mask of the whole sequence: the part of the second rank is padding.
        padding_mask = torch.zeros(BATCH, SEQUENCE, dtype=torch.bool, device="cuda")
        padding_mask[:, SEQUENCE // 2 :] = True
        own_part = padding_mask.chunk(2, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
        gradients = []
        for mask in (own_part, padding_mask):
            layer.zero_grad()
            output, _ = layer(hidden_states, padding_mask=mask)
            (output * 0.0).sum().backward()
            gradients.append(layer.router.weight.grad.clone())
        assert torch.equal(*gradients)
        assert gradients[0].any() == (parallel_state.get_tensor_model_parallel_rank() == 0)
