import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestZeroOffloadedGradBuffers:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_zero_grad_buffer_does_not_write_to_freed_memory(self):
        model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(),
            torch.nn.Linear(4, 4).cuda(),
        )
        (buffer,) = model.buffers
        written = []
        zero_ = buffer.grad_data.zero_
        # A write to freed memory would end the process.
        buffer.grad_data.zero_ = lambda: written.append(True)
        model.offload_grad_buffers()
        model.zero_grad_buffer()
        assert not written, "zero_grad_buffer() has written to offloaded memory"
        buffer.grad_data.zero_ = zero_

        model.restore_grad_buffers()
        buffer.grad_data.fill_(1.0)
        model.zero_grad_buffer()
        assert not buffer.grad_data.any()
