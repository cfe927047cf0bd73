import sys
from types import SimpleNamespace

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.utils import drain_embedding_wgrad_compute
from tests.unit_tests.test_utilities import Utils


class TestDrainEmbeddingWgrad:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    @pytest.mark.parametrize("microbatches", [1, 2, 3])
    def test_gradient_is_the_sum_over_microbatches(
        self, microbatches, sequence_parallel, monkeypatch
    ):
        def accumulate(inputs, grad_output, main_grad):
            main_grad.add_(grad_output.t() @ inputs)

        kernels = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
        monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", kernels)
        config = SimpleNamespace(
            sequence_parallel=sequence_parallel, gradient_accumulation_fusion=True
        )
        inputs = [torch.randn(4, 2, 8, device="cuda") for _ in range(microbatches)]
        grad_outputs = [torch.randn(4, 2, 6, device="cuda") for _ in range(microbatches)]
        expected = sum(
            torch.einsum("sbo,sbi->oi", grad, tensor) for grad, tensor in zip(grad_outputs, inputs)
        )
        weight = torch.nn.Parameter(torch.zeros(6, 8, device="cuda"))
        weight.main_grad = torch.zeros_like(weight)
        group = parallel_state.get_tensor_model_parallel_group()
        drain_embedding_wgrad_compute(config, inputs, grad_outputs, weight, group)
        assert torch.allclose(weight.main_grad, expected, atol=1e-5)
        assert not inputs and not grad_outputs
