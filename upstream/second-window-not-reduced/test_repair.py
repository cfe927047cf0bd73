import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestSecondWindowWithoutZeroing:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def run_windows(self, zero_first, **options):
        """Run one window per item of `zero_first`, and a last one; return the gradients.
        Gradients are zeroed before windows whose item is true, and not before the last.
        """
        model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(**options),
            torch.nn.Linear(4, 4).cuda(),
        )
        inputs = torch.ones(2, 4).cuda() * (1 + torch.distributed.get_rank())
        for zero in (*zero_first, False):
            if zero:
                model.zero_grad_buffer()
            model(inputs).sum().backward()
            model.finish_grad_sync()
        return model.buffers[0].grad_data

    @pytest.mark.parametrize("zero_first", [(True,), (True, True)])
    @pytest.mark.parametrize("average_in_collective", [False, True])
    def test_average_is_reduced_again(self, zero_first, average_in_collective):
        gradients = self.run_windows(
            zero_first, overlap_grad_reduce=True, average_in_collective=average_in_collective
        )
        expected = self.run_windows(zero_first, average_in_collective=average_in_collective)
        torch.testing.assert_close(gradients, expected, rtol=0, atol=0)

    @pytest.mark.skipif(Utils.world_size == 1, reason="a reduce-scatter of one rank is exact")
    def test_reduce_scatter_raises(self):
        with pytest.raises(RuntimeError, match="cannot be reduced again"):
            self.run_windows((True, True), overlap_grad_reduce=True, use_distributed_optimizer=True)
