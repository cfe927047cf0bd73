import pytest
import torch

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from tests.unit_tests.test_utilities import Utils


class TestBiasOfFrozenWeight:
    def setup_method(self, method):
        Utils.initialize_model_parallel(tensor_model_parallel_size=2)
        model_parallel_cuda_manual_seed(123)

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    @pytest.mark.parametrize("bias_is_trained", [False, True])
    def test_gradients_are_those_of_a_trained_weight(self, bias_is_trained, sequence_parallel):
        config = ModelParallelConfig(
            tensor_model_parallel_size=2,
            sequence_parallel=sequence_parallel,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        )
        layer = ColumnParallelLinear(
            16, 8, config=config, init_method=torch.nn.init.xavier_uniform_, bias=True
        ).cuda()
        layer.bias.requires_grad_(bias_is_trained)
        data = torch.randn(6, 2, 16, device="cuda")
        gradients = []
        for weight_is_trained in (True, False):
            layer.weight.requires_grad_(weight_is_trained)
            layer.bias.grad = None
            inputs = data.clone().requires_grad_()
            output, _ = layer(inputs)
            (output**2).sum().backward()
            gradients.append((inputs.grad, layer.bias.grad))
        (input_grad, bias_grad), (input_grad_frozen, bias_grad_frozen) = gradients
        assert torch.allclose(input_grad_frozen, input_grad)
        if bias_is_trained:
            assert bias_grad_frozen is not None
            assert torch.allclose(bias_grad_frozen, bias_grad)
        else:
            assert bias_grad_frozen is None
