import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestLossScale:
    def setup_method(self, method):
        Utils.initialize_model_parallel(1, 1)

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def get_model(self):
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True
        )
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8).to("cuda", torch.bfloat16)
        model.model_type = ModelType.encoder_or_decoder
        model.set_input_tensor = lambda input_tensor: None
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        return DistributedDataParallel(config, ddp_config, model)

    def get_optimizer(self, model, **options):
        config = OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True, **options
        )
        return get_megatron_optimizer(config, [model])

    def grad_norm(self, model, optimizer):
        def forward_step(data_iterator, model):
            hidden_states = torch.arange(8.0).to("cuda", torch.bfloat16)
            return model(hidden_states), lambda output: (output.float().sum(), {})

        model.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=model,
            num_microbatches=2,
            seq_length=1,
            micro_batch_size=1,
        )
        model.finish_grad_sync()
        optimizer.prepare_grads()
        return optimizer.get_grad_norm()

    def test_gradients_do_not_depend_on_scale(self):
        plain = self.get_model()
        expected = self.grad_norm(plain, self.get_optimizer(plain))
        assert plain.config.grad_scale_func is None
        model = self.get_model()
        # A model may get another optimizer.
        for loss_scale in (1024.0, 16.0):
            optimizer = self.get_optimizer(model, loss_scale=loss_scale)
            assert self.grad_norm(model, optimizer) == pytest.approx(expected)

    def test_custom_function_stays(self):
        model = self.get_model()
        model.config.grad_scale_func = custom = lambda loss: loss * 1024.0
        self.get_optimizer(model, loss_scale=1024.0)
        assert model.config.grad_scale_func is custom
