import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestForwardPreHooksTwice:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        self.model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(
                use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
            ),
            torch.nn.Sequential(torch.nn.Linear(4, 4)).cuda(),
        )

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def number_of_hooks(self):
        return sum(len(module._forward_pre_hooks) for module in self.model.module.modules())

    def test_disable_and_enable_twice(self):
        hooks = self.number_of_hooks()
        assert hooks == 2
        for _ in range(2):
            self.model.disable_forward_pre_hook()
            assert self.number_of_hooks() == 0
        for _ in range(2):
            self.model.enable_forward_pre_hook()
            assert self.number_of_hooks() == hooks

    def test_disable_after_the_module_tree_has_changed(self):
        removed = self.model.module[0]
        self.model.module[0] = torch.nn.Linear(4, 4).cuda()
        self.model.disable_forward_pre_hook()
        assert self.number_of_hooks() == len(removed._forward_pre_hooks) == 0
