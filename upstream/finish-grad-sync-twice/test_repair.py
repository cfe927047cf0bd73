import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestFinishGradSyncTwice:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    @pytest.mark.parametrize("use_distributed_optimizer", [False, True])
    @pytest.mark.parametrize("overlap_grad_reduce", [False, True])
    def test_second_call_changes_nothing(self, use_distributed_optimizer, overlap_grad_reduce):
        model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(
                use_distributed_optimizer=use_distributed_optimizer,
                overlap_grad_reduce=overlap_grad_reduce,
            ),
            torch.nn.Linear(8, 8).cuda(),
        )
        inputs = torch.ones(2, 8).cuda() * (1 + torch.distributed.get_rank())
        for _ in range(2):
            model.zero_grad_buffer()
            model(inputs).sum().backward()
            model.finish_grad_sync()
            reduced = model.buffers[0].grad_data.clone()
            model.finish_grad_sync()
            torch.testing.assert_close(model.buffers[0].grad_data, reduced, rtol=0, atol=0)

    def test_new_gradients_are_reduced(self):
        model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(),
            torch.nn.Linear(8, 8).cuda(),
        )
        inputs = torch.ones(2, 8).cuda() * (1 + torch.distributed.get_rank())
        model(inputs).sum().backward()
        model.finish_grad_sync()
        once = model.buffers[0].grad_data.clone()
        model(inputs).sum().backward()
        model.finish_grad_sync()
        torch.testing.assert_close(model.buffers[0].grad_data, 2 * once)
