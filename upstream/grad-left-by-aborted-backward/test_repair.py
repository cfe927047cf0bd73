import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestGradOfAbortedBackward:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    @pytest.mark.parametrize("overlap_grad_reduce", [False, True])
    def test_next_window_does_not_add_it(self, overlap_grad_reduce):
        model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(overlap_grad_reduce=overlap_grad_reduce),
            torch.nn.Linear(4, 4).cuda(),
        )
        weight = model.module.weight
        inputs = torch.ones(2, 4).cuda()

        def run_window():
            model.zero_grad_buffer()
            model(inputs).sum().backward()
            model.finish_grad_sync()
            return weight.main_grad.clone()

        expected = run_window()

        def fail(param):
            raise ValueError("interrupted")

        # Autograd has accumulated, and DDP's hook has not run yet.
        hook = weight.register_post_accumulate_grad_hook(fail)
        with pytest.raises(ValueError):
            run_window()
        hook.remove()
        assert weight.grad is not None

        model.zero_grad_buffer()
        assert weight.grad is None
        if not overlap_grad_reduce:
            torch.testing.assert_close(run_window(), expected, rtol=0, atol=0)
