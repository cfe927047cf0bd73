import gc
import weakref

import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestDeletedModel:
    def setup_method(self, method):
        Utils.initialize_model_parallel(1, 1)
        model_parallel_cuda_manual_seed(123)

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def train_step(self, optimizer_of=None, **options):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=4,
            add_bias_linear=False,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            **options,
        )
        spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
        model = GPTModel(config, spec, vocab_size=32, max_sequence_length=8).cuda()
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = DistributedDataParallel(config, ddp_config, model)
        optimizer = optimizer_of(model) if optimizer_of is not None else None
        tokens = torch.arange(8).view(1, 8).cuda()
        mask = torch.ones(1, 1, 8, 8, device=tokens.device).tril() < 0.5
        model(tokens, tokens, mask, labels=tokens).sum().backward()
        model.finish_grad_sync()
        if optimizer is not None:
            optimizer.step()
        return weakref.ref(model)

    def test_fp32_parameters_under_distributed_optimizer(self):
        config = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True)
        model = self.train_step(lambda model: get_megatron_optimizer(config, [model]))
        gc.collect()
        assert model() is None

    @pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
    def test_experts(self, dispatcher):
        model = self.train_step(
            num_moe_experts=4, moe_router_topk=2, moe_token_dispatcher_type=dispatcher
        )
        gc.collect()
        assert model() is None
