import itertools

import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestMixedPrecisionParamGroups:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_main_params_are_found_by_model_param(self):
        # A bf16 and an fp32 parameter alternate.
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
        for index, layer in enumerate(model):
            layer.to(torch.bfloat16 if index % 2 == 0 else torch.float32)
        model = DistributedDataParallel(
            TransformerConfig(num_layers=1, num_attention_heads=1, bf16=True),
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            model.cuda(),
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer='adam', lr=0.1, bf16=True, use_distributed_optimizer=True),
            [model],
        ).chained_optimizers[0]

        assert optimizer.model_param_gbuf_map
        for param in optimizer.model_param_gbuf_map:
            param_range = optimizer._get_model_param_range_map(param)['param']
            shard = param.detach().view(-1)[param_range.start : param_range.end]
            main_param = optimizer._get_main_param_and_optimizer_states(param)['param']
            assert torch.equal(main_param.to(shard.dtype), shard)

        # A load can write into the main params of both kinds.
        state = optimizer.get_parameter_state_dp_reshardable()
        for gbuf_idx in range(len(optimizer.buffers)):
            for buckets in state[gbuf_idx].values():
                for tensors in itertools.chain(*buckets):
                    tensors.update(param=torch.full_like(tensors['param'], 3.0), padding=False)
        optimizer.load_parameter_state_from_dp_reshardable(state)
        assert all(torch.all(main_param == 3.0) for main_param in optimizer.get_parameters())
