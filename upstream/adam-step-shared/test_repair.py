import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.dist_checkpointing import TempNamedDir
from tests.unit_tests.test_utilities import Utils


def _model_and_optimizer(bf16=True, **options):
    torch.manual_seed(0)
    model = DistributedDataParallel(
        TransformerConfig(num_layers=1, num_attention_heads=1, bf16=bf16),
        DistributedDataParallelConfig(use_distributed_optimizer=True),
        torch.nn.Linear(64, 64).to(torch.bfloat16 if bf16 else torch.float32).cuda(),
    )
    config = OptimizerConfig(
        optimizer='adam',
        lr=0.1,
        bf16=bf16,
        use_distributed_optimizer=True,
        **options,
    )
    return model, get_megatron_optimizer(config, [model])


def _step(model, optimizer, grad):
    for param in model.parameters():
        param.main_grad.fill_(grad)
    optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def _sharded_state_dict(model, optimizer, sharding_type, is_loading=False):
    params = {
        name: ShardedTensor.from_rank_offsets(name, param)
        for name, param in model.module.named_parameters()
    }
    metadata = {'distrib_optim_sharding_type': sharding_type}
    return optimizer.sharded_state_dict(params, is_loading, metadata=metadata)


class TestLoadOfTorchAdam:
    def setup_method(self, method):
        Utils.initialize_model_parallel()

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    @pytest.mark.parametrize('sharding_type', ['dp_reshardable', 'fully_reshardable'])
    @pytest.mark.parametrize(
        'options',
        [
            {},
            {'bf16': False},
            {'optimizer_cpu_offload': True, 'optimizer_offload_fraction': 1.0},
            {'optimizer_cpu_offload': True, 'use_precision_aware_optimizer': True},
        ],
    )
    def test_training_continues_after_load(self, tmp_path_dist_ckpt, sharding_type, options):
        with TempNamedDir(tmp_path_dist_ckpt / 'adam_step') as ckpt_dir:
            model, optimizer = _model_and_optimizer(**options)
            for grad in (1.0, 2.0):
                _step(model, optimizer, grad)
            dist_checkpointing.save(
                _sharded_state_dict(model, optimizer, sharding_type), ckpt_dir
            )
            expected = _step(model, optimizer, -3.0)

            model, optimizer = _model_and_optimizer(**options)
            _step(model, optimizer, 4.0)
            state_dict = dist_checkpointing.load(
                _sharded_state_dict(model, optimizer, sharding_type, is_loading=True), ckpt_dir
            )
            optimizer.load_state_dict(state_dict)
            loaded = _step(model, optimizer, -3.0)

        assert all(torch.equal(a, b) for a, b in zip(expected, loaded))
        (part,) = optimizer.chained_optimizers
        assert {float(state['step']) for state in part.optimizer.state.values()} == {3.0}
