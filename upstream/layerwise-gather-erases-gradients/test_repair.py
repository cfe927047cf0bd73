import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestGatherWhileGradientsWait:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(2)]
        self.model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(overlap_grad_reduce=True, overlap_param_gather=True),
            torch.nn.Sequential(*layers).bfloat16().cuda(),
        )
        adam = torch.optim.AdamW([{"params": list(self.model.parameters())}], lr=0.1)
        self.optimizer = LayerWiseDistributedOptimizer(
            [adam],
            OptimizerConfig(optimizer="adam", lr=0.1, bf16=True, overlap_param_gather=True),
            ProcessGroupCollection.use_mpu_process_groups(),
            model_chunks=[self.model],
        )
        self.inputs = torch.ones(2, 8, dtype=torch.bfloat16).cuda()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def gradients(self):
        return torch.cat([param.main_grad.flatten() for param in self.model.parameters()])

    @pytest.mark.parametrize("forced", [False, True])
    def test_gather_keeps_the_gradients(self, forced):
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.model(self.inputs).sum().backward()
        self.model.finish_grad_sync()
        reduced = self.gradients().clone()
        assert reduced.any()
        if forced:
            self.model.start_param_sync(force_sync=True)
        else:
            with torch.no_grad():
                self.model(self.inputs)  # for example an evaluation
        torch.testing.assert_close(self.gradients(), reduced, rtol=0, atol=0)

    def test_ranks_agree_after_a_gather(self):
        for _ in range(2):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            self.model(self.inputs).sum().backward()
            self.model.finish_grad_sync()
            assert self.optimizer.step()[0]
        self.model.start_param_sync(force_sync=True)
        for param in self.model.parameters():
            params = [torch.empty_like(param) for _ in range(Utils.world_size)]
            torch.distributed.all_gather(params, param.detach())
            for rank_param in params:
                torch.testing.assert_close(rank_param, param.detach(), rtol=0, atol=0)
