from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestMultiTokenPredictionWithoutTransformerEngine:
    def setup_method(self, method):
        Utils.initialize_model_parallel()
        model_parallel_cuda_manual_seed(123)

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_local_block_is_built(self):
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=2,
            mtp_num_layers=2,
            use_cpu_initialization=True,
        )
        spec = get_gpt_mtp_block_spec(
            config, get_gpt_layer_local_spec(), use_transformer_engine=False
        )
        block = MultiTokenPredictionBlock(
            config, spec, pg_collection=ProcessGroupCollection.use_mpu_process_groups()
        )
        assert len(block.layers) == 2
