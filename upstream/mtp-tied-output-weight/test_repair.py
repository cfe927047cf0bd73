import torch

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestTiedModelWithMTPOnTwoStages:
    def setup_method(self, method):
        Utils.initialize_model_parallel(pipeline_model_parallel_size=2)
        model_parallel_cuda_manual_seed(123)

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def test_sharded_state_dict_has_no_output_weight(self, monkeypatch):
        # This function needs Transformer Engine.
        monkeypatch.setattr(
            multi_token_prediction, "is_inference_column_parallel_linear", lambda module: False
        )
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=2,
            mtp_num_layers=1,
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
        )
        spec = get_gpt_layer_local_spec()
        is_last = parallel_state.is_pipeline_last_stage()
        model = GPTModel(
            config,
            spec,
            vocab_size=64,
            max_sequence_length=16,
            pre_process=not is_last,
            post_process=is_last,
            share_embeddings_and_output_weights=True,
            mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
        )
        if is_last:
            assert model.output_layer.weight is None
            assert model.shared_embedding_or_output_weight().zero_out_wgrad
        assert "output_layer.weight" not in model.sharded_state_dict()
