import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from tests.unit_tests.test_utilities import Utils


class TestTokensOfAbortedWindow:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_zero_grad_buffer_resets_the_counts(self):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            num_moe_experts=4,
            moe_router_topk=2,
            moe_router_enable_expert_bias=True,
            moe_router_score_function="sigmoid",
            moe_router_load_balancing_type="none",
            use_cpu_initialization=True,
            add_bias_linear=False,
        )
        router = TopKRouter(config, get_default_pg_collection()).cuda()
        model = DistributedDataParallel(config, DistributedDataParallelConfig(), router)
        tokens = torch.randn(3, 2, 8).cuda()

        model(tokens)
        assert router.local_tokens_per_expert.sum() == 3 * 2 * config.moe_router_topk
        # The window ends here, without finalize_model_grads().
        model.zero_grad_buffer()
        assert router.local_tokens_per_expert.sum() == 0
        model(tokens)
        assert router.local_tokens_per_expert.sum() == 3 * 2 * config.moe_router_topk
