import pytest
import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_tokens_per_expert_and_token_count,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils

SEQUENCE, BATCH, HIDDEN = 8, 2, 16


class TestAuxLossPerTokenWithPaddingMask:
    def setup_method(self, method):
        Utils.initialize_model_parallel(tensor_model_parallel_size=2)
        model_parallel_cuda_manual_seed(123)
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        MoEAuxLossAutoScaler.main_loss_backward_scale = None

    def teardown_method(self, method):
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
        Utils.destroy_model_parallel()

    @pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
    def test_mask_that_hides_nothing_changes_nothing(self, kind):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=2,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            num_moe_experts=4,
            moe_aux_loss_coeff=0.1,
            moe_router_load_balancing_type=kind,
            calculate_per_token_loss=True,
            add_bias_linear=False,
            use_cpu_initialization=True,
        )
        router = TopKRouter(config, pg_collection=self.groups).cuda()
        router.set_layer_number(1)
        hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, device="cuda")
        gradients = []
        for mask in (None, torch.zeros(SEQUENCE, BATCH, dtype=torch.bool, device="cuda")):
            router.zero_grad()
            router.reset_global_aux_loss_tracker()
            probs, _ = router(hidden, mask)
            (probs * 0).sum().backward()
            gradients.append(router.weight.grad.clone())
        assert gradients[0].any()
        assert torch.allclose(*gradients)

    def test_ranks_count_equal_shares(self):
        # Two experts per token; all tokens of the second rank are padding.
        routing_map = torch.tensor([[True, True, False]] * 6, device="cuda")
        routing_map &= self.groups.tp.rank() == 0
        _, local, total = get_tokens_per_expert_and_token_count(
            routing_map, self.groups.tp, topk=2, with_padding_mask=True
        )
        assert (local.item(), total.item()) == (3, 6)
