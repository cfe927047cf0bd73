import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestOffloadKeepsViewsOfParamBuffers:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_step_reaches_the_model_after_offload_and_restore(self):
        model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            torch.nn.Linear(4, 4).cuda(),
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=0.1, weight_decay=0.0, use_distributed_optimizer=True
            ),
            [model],
        )
        optimizer.offload_to_cpu()
        optimizer.restore_from_cpu()
        # Parameters that are loaded into the model reach the optimizer, because it has views.
        with torch.no_grad():
            model.module.weight.fill_(7.0)
        model.zero_grad_buffer()
        model(torch.ones(2, 4).cuda()).sum().backward()
        model.finish_grad_sync()
        optimizer.step()
        # Adam's first step moves each parameter by the learning rate.
        expected = torch.full_like(model.module.weight, 6.9)
        torch.testing.assert_close(model.module.weight.detach(), expected)
