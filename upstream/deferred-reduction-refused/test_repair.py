import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestFinishAfterNoSync:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        self.model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1),
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).cuda(),
        )
        self.inputs = torch.ones(2, 4).cuda() * (1 + torch.distributed.get_rank())

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def backward(self):
        self.model(self.inputs).sum().backward()

    def finish(self):
        self.model.finish_grad_sync()
        return self.model.buffers[0].grad_data.clone()

    def test_gradients_that_were_held_back_are_reduced(self):
        self.backward()
        expected = self.finish()
        for _ in range(2):
            self.model.zero_grad_buffer()
            with self.model.no_sync():
                self.backward()
            torch.testing.assert_close(self.finish(), expected, rtol=0, atol=0)

    def test_reductions_that_were_started_are_not_repeated(self):
        self.backward()
        expected = self.finish()
        self.model.zero_grad_buffer()
        with self.model.no_sync():
            self.backward()
        self.model.start_grad_sync()
        torch.testing.assert_close(self.finish(), expected, rtol=0, atol=0)
        torch.testing.assert_close(self.finish(), expected, rtol=0, atol=0)
