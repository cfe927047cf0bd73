import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestForwardBetweenReductionAndStep:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_ranks_agree_after_the_step(self):
        torch.manual_seed(0)
        model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(
                use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
            ),
            torch.nn.Linear(8, 8).cuda(),
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=0.1, use_distributed_optimizer=True, overlap_param_gather=True
            ),
            [model],
        )
        inputs = torch.ones(2, 8).cuda()

        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(inputs).sum().backward()
        model.finish_grad_sync()
        with torch.no_grad():
            model(inputs)  # for example an evaluation
            assert optimizer.step()[0]
            model(inputs)

        weight = model.module.weight.detach()
        weights = [torch.empty_like(weight) for _ in range(Utils.world_size)]
        torch.distributed.all_gather(weights, weight)
        for other in weights:
            torch.testing.assert_close(other, weight, rtol=0, atol=0)
