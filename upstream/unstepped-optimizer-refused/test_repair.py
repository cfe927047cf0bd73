import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.dist_checkpointing import TempNamedDir
from tests.unit_tests.test_utilities import Utils


def _model_and_optimizer(**options):
    torch.manual_seed(0)
    model = DistributedDataParallel(
        TransformerConfig(num_layers=1, num_attention_heads=1, bf16=True),
        DistributedDataParallelConfig(use_distributed_optimizer=True),
        torch.nn.Linear(64, 64).bfloat16().cuda(),
    )
    config = OptimizerConfig(
        optimizer='adam',
        lr=0.1,
        bf16=True,
        use_distributed_optimizer=True,
        **options,
    )
    return model, get_megatron_optimizer(config, [model])


def _sharded_state_dict(model, optimizer, sharding_type, is_loading=False):
    params = {
        name: ShardedTensor.from_rank_offsets(name, param)
        for name, param in model.module.named_parameters()
    }
    metadata = {'distrib_optim_sharding_type': sharding_type}
    return optimizer.sharded_state_dict(params, is_loading, metadata=metadata)


def _state(optimizer):
    (part,) = optimizer.chained_optimizers
    return [
        part._get_main_param_and_optimizer_states(param) for param in part.model_param_gbuf_map
    ]


class TestStateDictBeforeFirstStep:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    @pytest.mark.parametrize(
        'options', [{}, {'optimizer_cpu_offload': True, 'optimizer_offload_fraction': 1.0}]
    )
    def test_new_optimizers_save_and_load(self, tmp_path_dist_ckpt, options):
        with TempNamedDir(tmp_path_dist_ckpt / 'before_first_step') as ckpt_dir:
            model, optimizer = _model_and_optimizer(**options)
            saved = _sharded_state_dict(model, optimizer, 'dp_reshardable')
            dist_checkpointing.save(saved, ckpt_dir)

            model, new_optimizer = _model_and_optimizer(**options)
            template = _sharded_state_dict(model, new_optimizer, 'dp_reshardable', is_loading=True)
            new_optimizer.load_state_dict(dist_checkpointing.load(template, ckpt_dir))

        for expected, loaded in zip(_state(optimizer), _state(new_optimizer)):
            assert expected['step'] == loaded['step'] == 0
            assert torch.equal(expected['param'], loaded['param'])
            assert not loaded['exp_avg'].any() and not loaded['exp_avg_sq'].any()
