import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import drain_embedding_wgrad_compute
from tests.unit_tests.test_utilities import Utils


class TestReductionOfDeferredGrad:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        self.model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(overlap_grad_reduce=True),
            torch.nn.Linear(8, 6, bias=False).cuda(),
        )
        self.window()  # the first window learns when to reduce
        (self.group,) = self.model.bucket_groups
        self.group.start_grad_sync = mock.Mock(wraps=self.group.start_grad_sync)

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def window(self):
        self.model.zero_grad_buffer()
        self.model(torch.ones(4, 2, 8).cuda()).sum().backward()

    def drain(self, monkeypatch):
        def accumulate(inputs, grad_output, main_grad):
            assert self.group.grad_reduce_handle is None, "the reduction has begun already"
            main_grad.add_(grad_output.t() @ inputs)

        kernels = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
        monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", kernels)
        config = SimpleNamespace(sequence_parallel=False, gradient_accumulation_fusion=True)
        tensors = [[torch.ones(4, 2, size, device="cuda") for _ in range(2)] for size in (8, 6)]
        group = parallel_state.get_tensor_model_parallel_group()
        drain_embedding_wgrad_compute(config, *tensors, self.model.module.weight, group)

    @pytest.mark.parametrize("aligned", [False, True])
    def test_reduction_begins_after_the_deferred_grad(self, aligned, monkeypatch):
        self.model.finish_grad_sync()
        self.model.module.weight.wgrad_deferred = True  # as the output layer's forward does
        if aligned:
            self.model.zero_grad_buffer()
            with self.model.no_sync():
                self.model(torch.ones(4, 2, 8).cuda()).sum().backward()
            self.model.start_grad_sync()
        else:
            self.window()
        assert self.group.grad_reduce_handle is None
        self.drain(monkeypatch)
        assert self.group.grad_reduce_handle is not None
        self.model.finish_grad_sync()

    def test_next_window_reduces_in_the_backward(self, monkeypatch):
        self.model.finish_grad_sync()
        self.model.module.weight.wgrad_deferred = True
        self.window()
        self.drain(monkeypatch)
        self.model.finish_grad_sync()
        self.window()
        assert self.group.grad_reduce_handle is not None
        self.model.finish_grad_sync()
