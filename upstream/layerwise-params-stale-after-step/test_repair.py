import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestForwardBetweenReductionAndLayerWiseStep:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_ranks_agree_after_the_step(self):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(2)]
        model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(overlap_grad_reduce=True, overlap_param_gather=True),
            torch.nn.Sequential(*layers).bfloat16().cuda(),
        )
        # The weight decay moves parameters whatever their gradients are.
        adam = torch.optim.AdamW([{"params": list(model.parameters())}], lr=0.1, weight_decay=1.0)
        optimizer = LayerWiseDistributedOptimizer(
            [adam],
            OptimizerConfig(optimizer="adam", lr=0.1, bf16=True, overlap_param_gather=True),
            ProcessGroupCollection.use_mpu_process_groups(),
            model_chunks=[model],
        )
        inputs = torch.ones(2, 8, dtype=torch.bfloat16).cuda()

        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(inputs).sum().backward()
        model.finish_grad_sync()
        with torch.no_grad():
            model(inputs)  # for example an evaluation
            assert optimizer.step()[0]
            model(inputs)

        for param in model.parameters():
            params = [torch.empty_like(param) for _ in range(Utils.world_size)]
            torch.distributed.all_gather(params, param.detach())
            for rank_param in params:
                torch.testing.assert_close(rank_param, param.detach(), rtol=0, atol=0)
