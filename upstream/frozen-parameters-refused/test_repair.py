import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestFreezeBetweenWindows:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def run_windows(self, **options):
        """Run three windows, the last two with a frozen bias; return the gradients."""
        torch.manual_seed(0)
        model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(**options),
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).cuda(),
        )
        inputs = torch.ones(2, 8).cuda() * (1 + torch.distributed.get_rank())
        for _ in range(3):
            model.zero_grad_buffer()
            model(inputs).sum().backward()
            model.finish_grad_sync()
            model.module[1].bias.requires_grad_(False)
        return [param.main_grad.clone() for param in model.module.parameters()]

    # Parameters share a bucket with the bias, or each has a bucket of its own.
    @pytest.mark.parametrize("bucket_size", [None, 1])
    def test_gradients_are_those_without_overlap(self, bucket_size):
        expected = self.run_windows(overlap_grad_reduce=False)
        gradients = self.run_windows(overlap_grad_reduce=True, bucket_size=bucket_size)
        for gradient, other in zip(gradients, expected):
            torch.testing.assert_close(gradient, other)

    def test_frozen_parameters_are_gathered(self):
        self.run_windows(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
        )
