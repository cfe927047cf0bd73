import pytest

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestRoutingReplayOfMTPLayers:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        RouterReplay.clear_global_router_replay_instances()

    def teardown_method(self, method):
        RouterReplay.clear_global_router_replay_instances()
        Utils.destroy_model_parallel()

    @pytest.mark.parametrize("is_mtp_layer", [False, True])
    def test_only_routers_of_the_decoder_are_replayed(self, is_mtp_layer):
        config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=2,
            num_moe_experts=4,
            moe_enable_routing_replay=True,
            use_cpu_initialization=True,
        )
        router = TopKRouter(
            config,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            is_mtp_layer=is_mtp_layer,
        )
        router.set_layer_number(1)
        assert (router.router_replay is None) == is_mtp_layer
        assert len(RouterReplay.global_router_replay_instances) == 1 - is_mtp_layer
