import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestWindowAfterAbortedBackward:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_zero_grad_buffer_waits_for_reductions_in_flight(self):
        torch.manual_seed(0)
        model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1),
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).cuda(),
        )
        first = next(model.module.parameters())
        inputs = torch.ones(2, 8).cuda() * (1 + torch.distributed.get_rank())

        def run_window():
            model.zero_grad_buffer()
            model(inputs).sum().backward()
            model.finish_grad_sync()
            return model.buffers[0].grad_data.clone()

        run_window()  # the first window learns when to reduce
        expected = run_window()

        def fail(grad):
            raise ValueError("interrupted")

        hook = first.register_hook(fail)
        try:
            run_window()
        except ValueError:
            hook.remove()
        assert any(group.grad_reduce_handle is not None for group in model.bucket_groups)

        for _ in range(2):
            torch.testing.assert_close(run_window(), expected, rtol=0, atol=0)
