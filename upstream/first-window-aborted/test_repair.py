import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestFirstWindow:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        torch.manual_seed(0)
        self.model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(overlap_grad_reduce=True),
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).cuda(),
        )
        self.inputs = torch.ones(2, 8).cuda() * (1 + torch.distributed.get_rank())

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def run_window(self, backwards=1):
        self.model.zero_grad_buffer()
        for _ in range(backwards):
            self.model(self.inputs).sum().backward()
        self.model.finish_grad_sync()
        return self.model.buffers[0].grad_data.clone()

    def windows_agree(self, backwards=1):
        expected = self.run_window(backwards)  # learns when to reduce
        for _ in range(2):
            torch.testing.assert_close(self.run_window(backwards), expected, rtol=0, atol=0)
        # All ranks have the average.
        total = expected.clone()
        torch.distributed.all_reduce(total)
        torch.testing.assert_close(total / Utils.world_size, expected)
        assert not any(group.is_first_batch for group in self.model.bucket_groups)

    def test_aborted_in_its_backward(self):
        def fail(grad):
            raise ValueError("interrupted")

        hook = next(self.model.module.parameters()).register_hook(fail)
        with pytest.raises(ValueError):
            self.run_window()
        hook.remove()
        self.windows_agree()

    def test_aborted_between_two_backwards(self):
        self.model.zero_grad_buffer()
        self.model(self.inputs).sum().backward()
        self.windows_agree(backwards=2)

    def test_unused_parameters(self):
        self.model.zero_grad_buffer()
        self.model.module[0](self.inputs).sum().backward()
        self.model.finish_grad_sync()
        self.windows_agree()
