import pytest
import torch

from megatron.core import ModelParallelConfig
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from tests.unit_tests.test_utilities import Utils


class TestReplayAfterSchedule:
    def setup_method(self, method):
        RouterReplay.clear_global_router_replay_instances()
        self.router = RouterReplay()

    def teardown_method(self, method):
        RouterReplay.clear_global_router_replay_instances()
        Utils.destroy_model_parallel()

    @pytest.mark.parametrize("pp, vp", [(1, None), (2, None), (2, 2)])
    def test_recompute_replays_its_own_window(self, pp, vp):
        Utils.initialize_model_parallel(
            pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vp
        )
        config = ModelParallelConfig(
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vp,
            pipeline_dtype=torch.float,
        )
        config.hidden_size = 8
        config.moe_enable_routing_replay = True
        model = torch.nn.Linear(4, 1)
        model.config = config
        model.model_type = ModelType.encoder_or_decoder
        model.set_input_tensor = lambda input_tensor: None
        first, second = torch.tensor([[0, 1]]), torch.tensor([[2, 3]])

        def forward_step(data_iterator, model):
            RouterReplay.set_replay_data([first])
            return torch.rand(4, 2, 8).cuda(), lambda output: (output.sum(), {})

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[None] * (vp or 1),
            model=[model] * (vp or 1),
            num_microbatches=4,
            seq_length=4,
            micro_batch_size=2,
            forward_only=True,
        )
        assert self.router.target_topk_idx is first
        RouterReplay.set_replay_data([second])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        _, experts = self.router.get_replay_topk(torch.rand(1, 4), 2)
        assert torch.equal(experts, second)
