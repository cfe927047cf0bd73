import copy

import torch

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.schedules import clear_embedding_activation_buffer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from tests.unit_tests.test_utilities import Utils


class TestBuffersOfDeferredEmbeddingWgrad:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        model_parallel_cuda_manual_seed(123)
        self.layer = ColumnParallelLinear(
            16,
            8,
            config=ModelParallelConfig(use_cpu_initialization=True),
            init_method=torch.nn.init.xavier_uniform_,
            bias=False,
            embedding_activation_buffer=[],
            grad_output_buffer=[],
        ).cuda()
        # The config has the flags from here on, because the layer would look for fused kernels.
        self.layer.config = copy.copy(self.layer.config)
        self.layer.config.defer_embedding_wgrad_compute = True
        self.layer.config.wgrad_deferral_limit = 0
        self.layer.post_process = True

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def _forward(self):
        output, _ = self.layer(torch.ones(4, 2, 16, device="cuda", requires_grad=True))
        return output

    def test_forward_without_gradients_keeps_no_input(self):
        with torch.no_grad():
            self._forward()
        assert not self.layer.embedding_activation_buffer
        self._forward()
        assert len(self.layer.embedding_activation_buffer) == 1

    def test_window_begins_with_empty_buffers(self):
        self._forward()
        self._forward()
        # A backward keeps its output gradient here; the window is interrupted after the first.
        self.layer.grad_output_buffer.append(torch.ones(4, 2, 8, device="cuda"))
        clear_embedding_activation_buffer(self.layer.config, self.layer, is_last_stage=True)
        assert not self.layer.embedding_activation_buffer
        assert not self.layer.grad_output_buffer
