import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestReloadWithCpuOffload:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    @pytest.mark.parametrize(
        'options',
        [
            {'bf16': True, 'use_distributed_optimizer': True},
            {
                'bf16': True,
                'use_distributed_optimizer': True,
                'use_precision_aware_optimizer': True,
            },
            {'use_distributed_optimizer': False},
        ],
    )
    @pytest.mark.parametrize('fraction', [0.0, 0.5, 1.0])
    def test_step_continues_from_reloaded_params(self, options, fraction):
        bf16 = options.get('bf16', False)
        model = DistributedDataParallel(
            TransformerConfig(num_layers=1, num_attention_heads=1, bf16=bf16),
            DistributedDataParallelConfig(
                use_distributed_optimizer=options['use_distributed_optimizer']
            ),
            torch.nn.Linear(64, 64).to(torch.bfloat16 if bf16 else torch.float32).cuda(),
        )
        config = OptimizerConfig(
            optimizer='adam',
            lr=0.01,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=fraction,
            **options,
        )
        optimizer = get_megatron_optimizer(config, [model])

        with torch.no_grad():
            for param in model.parameters():
                param.fill_(5.0)
        optimizer.reload_model_params()
        for param in model.parameters():
            param.main_grad.fill_(1.0)
        optimizer.step()
        for param in model.parameters():
            torch.testing.assert_close(
                param.float(), torch.full_like(param, 5.0).float(), atol=0.1, rtol=0.0
            )
