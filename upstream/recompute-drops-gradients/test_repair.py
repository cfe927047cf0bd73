import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import checkpoint, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestRecomputeBehindFrozenParameters:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def _gradients(self, **recompute):
        model_parallel_cuda_manual_seed(123)
        torch.manual_seed(123)
        config = TransformerConfig(
            num_layers=3,
            hidden_size=16,
            num_attention_heads=2,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_dropout_fusion=False,
            use_cpu_initialization=True,
            **recompute,
        )
        block = TransformerBlock(config, get_gpt_layer_local_spec()).cuda()
        for name, parameter in block.named_parameters():
            parameter.requires_grad_("input_layernorm" in name)
        # A frozen embedding returns hidden states that require no gradient.
        hidden_states = torch.randn(8, 2, 16, device="cuda")
        mask = torch.ones(1, 1, 8, 8, device="cuda").tril() < 0.5
        (block(hidden_states, mask) ** 2).sum().backward()
        return [p.grad for p in block.parameters() if p.requires_grad]

    @pytest.mark.parametrize("method", ["uniform", "block"])
    def test_gradients_are_those_without_recomputation(self, method):
        expected = self._gradients()
        gradients = self._gradients(
            recompute_granularity="full", recompute_method=method, recompute_num_layers=1
        )
        assert all(gradient is not None for gradient in gradients)
        assert all(torch.allclose(*pair) for pair in zip(gradients, expected))

    def test_piece_with_frozen_input_runs_once(self):
        runs = []

        def piece(tensor):
            runs.append(torch.is_grad_enabled())
            return tensor * weight

        weight = torch.ones(4, device="cuda", requires_grad=True)
        checkpoint(piece, False, torch.ones(4, device="cuda")).sum().backward()
        assert runs == [True]
        assert weight.grad is not None
