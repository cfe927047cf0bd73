import math

import torch

from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.unit_tests.test_utilities import Utils


class TestExpertsWithoutDenseReplicas:
    def setup_method(self, method):
        # The halves of dense layers have no replica, experts have two.
        Utils.initialize_model_parallel(
            tensor_model_parallel_size=2, expert_tensor_parallel_size=1
        )

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_each_expert_is_updated_once(self):
        assert parallel_state.get_data_parallel_world_size() == 1
        assert parallel_state.get_expert_data_parallel_world_size() == 2
        dense, *experts = (
            torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16, device='cuda'))
            for _ in range(5)
        )
        dense.tensor_model_parallel = True
        for param in experts:
            param.allreduce = False
        for param in (dense, *experts):
            param.main_grad = torch.ones(8, 8, device='cuda')
        adam = torch.optim.Adam(
            [{'params': [dense]}, {'params': experts, 'is_expert_parallel': True}], lr=0.1
        )
        optimizer = LayerWiseDistributedOptimizer(
            [adam],
            OptimizerConfig(optimizer='adam', lr=0.1, bf16=True, clip_grad=1.0),
            ProcessGroupCollection.use_mpu_process_groups(),
        )
        assert len(optimizer.get_parameters()) == 3

        # Two halves of the dense layer, and four experts.
        _, grad_norm, _ = optimizer.step()
        assert math.isclose(grad_norm, math.sqrt(6 * 64), rel_tol=1e-5)
        assert all(torch.all(param < 0) for param in (dense, *experts))
