from unittest import mock

import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestStepWithoutForwardPreHooks:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        torch.manual_seed(0)
        self.model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(
                use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
            ),
            torch.nn.Linear(8, 8).cuda(),
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=0.1, use_distributed_optimizer=True, overlap_param_gather=True
            ),
            [self.model],
        )
        (self.group,) = self.model.bucket_groups
        self.group.start_param_sync = mock.Mock(wraps=self.group.start_param_sync)

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def window(self):
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 8).cuda()).sum().backward()
        self.model.finish_grad_sync()

    def assert_ranks_agree(self):
        weight = self.model.module.weight.detach()
        weights = [torch.empty_like(weight) for _ in range(Utils.world_size)]
        torch.distributed.all_gather(weights, weight)
        for other in weights:
            torch.testing.assert_close(other, weight, rtol=0, atol=0)

    def test_next_forward_gathers(self):
        self.window()
        self.optimizer.step()
        # As train() does when it is called right after a step.
        self.model.disable_forward_pre_hook(param_sync=False)
        self.window()
        self.assert_ranks_agree()
        self.optimizer.step()
        self.window()
        self.assert_ranks_agree()

    def test_no_gather_without_an_update(self):
        self.model.disable_forward_pre_hook(param_sync=False)
        self.window()
        self.group.start_param_sync.assert_not_called()
        self.optimizer.step()
        self.model.enable_forward_pre_hook()
        self.window()
        self.group.start_param_sync.assert_called_once()  # by the hooks
        self.assert_ranks_agree()

    def test_no_second_gather_after_a_synchronous_one(self):
        self.window()
        self.optimizer.step()
        self.model.disable_forward_pre_hook()
        self.group.start_param_sync.reset_mock()
        self.model(torch.ones(2, 8).cuda())
        self.group.start_param_sync.assert_not_called()
        self.assert_ranks_agree()
