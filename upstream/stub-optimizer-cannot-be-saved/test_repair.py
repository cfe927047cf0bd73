import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.dist_checkpointing import TempNamedDir
from tests.unit_tests.test_utilities import Utils


class TestChainWithStub:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        # Only experts are trained.
        experts = torch.nn.Linear(64, 64, bias=False)
        experts.weight.allreduce = False
        trunk = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.model = DistributedDataParallel(
            TransformerConfig(num_layers=1, num_attention_heads=1, num_moe_experts=2, bf16=True),
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            torch.nn.Sequential(trunk, experts).bfloat16().cuda(),
        )
        config = OptimizerConfig(
            optimizer='adam', lr=0.1, bf16=True, use_distributed_optimizer=True
        )
        self.optimizer = get_megatron_optimizer(config, [self.model])
        self.weight = experts.weight

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def _step(self):
        self.weight.main_grad.fill_(1.0)
        self.optimizer.step()

    def _sharded_state_dict(self, is_loading=False):
        return self.optimizer.sharded_state_dict(
            {'weight': ShardedTensor.from_rank_offsets('weight', self.weight)},
            is_loading,
            metadata={'distrib_optim_sharding_type': 'dp_reshardable'},
        )

    def test_saves_and_loads(self, tmp_path_dist_ckpt):
        stubs = [part.is_stub_optimizer for part in self.optimizer.chained_optimizers]
        assert stubs == [True, False]
        self._step()
        saved = self.optimizer.get_parameters()[0].detach().clone()
        assert self.optimizer.state_dict()[0] == {}
        self.optimizer.load_state_dict(self.optimizer.state_dict())

        with TempNamedDir(tmp_path_dist_ckpt / 'chain_with_stub') as ckpt_dir:
            state_dict = {'optimizer': self._sharded_state_dict()}
            dist_checkpointing.save(state_dict, ckpt_dir, async_strategy='mcore')
            self._step()
            assert not torch.equal(self.optimizer.get_parameters()[0], saved)
            template = {'optimizer': self._sharded_state_dict(is_loading=True)}
            loaded = dist_checkpointing.load(template, ckpt_dir)
            self.optimizer.load_state_dict(loaded['optimizer'])
        assert torch.equal(self.optimizer.get_parameters()[0], saved)
