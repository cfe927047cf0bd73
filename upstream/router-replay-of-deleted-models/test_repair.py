import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestReplayAfterModelIsDeleted:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        RouterReplay.clear_global_router_replay_instances()

    def teardown_method(self, method):
        RouterReplay.clear_global_router_replay_instances()
        Utils.destroy_model_parallel()

    def _model(self):
        config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=2,
            num_moe_experts=4,
            moe_enable_routing_replay=True,
            use_cpu_initialization=True,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        return [TopKRouter(config, pg_collection=groups) for _ in range(2)]

    def test_routers_of_deleted_model_are_not_counted(self):
        self._model()
        model = self._model()
        RouterReplay.set_replay_data([torch.full((4, 2), layer) for layer in range(2)])
        assert [router.router_replay.target_topk_idx[0, 0].item() for router in model] == [0, 1]
        assert len(RouterReplay.get_recorded_data()) == 2

    def test_cycles_of_deleted_model_are_collected(self):
        old = self._model()
        old[0].model = old
        del old
        model = self._model()
        RouterReplay.set_replay_data([torch.zeros(4, 2)] * 2)
        assert RouterReplay.global_router_replay_instances == [r.router_replay for r in model]

    def test_cleared_list_is_left_alone(self):
        model = self._model()
        RouterReplay.clear_global_router_replay_instances()
        replay = RouterReplay()
        del model
        assert RouterReplay.global_router_replay_instances == [replay]
