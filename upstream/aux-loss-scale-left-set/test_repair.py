import pytest
import torch

from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils

SCALERS = (MoEAuxLossAutoScaler, MTPLossAutoScaler)


class TestScalesAfterSchedule:
    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    @pytest.mark.parametrize("pp, vp", [(1, None), (2, None), (2, 2)])
    @pytest.mark.parametrize("forward_only", [True, False])
    def test_full_weight(self, pp, vp, forward_only):
        Utils.initialize_model_parallel(
            pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vp
        )
        config = TransformerConfig(
            num_layers=4,
            hidden_size=8,
            num_attention_heads=1,
            num_moe_experts=2,
            add_bias_linear=False,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vp,
            pipeline_dtype=torch.float,
            use_cpu_initialization=True,
        )
        config.mtp_num_layers = 1
        model = torch.nn.Linear(8, 8).cuda()
        model.config = config
        model.model_type = ModelType.encoder_or_decoder
        inputs = []
        model.set_input_tensor = lambda input_tensors: inputs.append(input_tensors[0])
        scales = []
        model.weight.register_hook(
            lambda _: scales.extend(scaler.main_loss_backward_scale.item() for scaler in SCALERS)
        )

        def forward_step(data_iterator, model):
            hidden_states = inputs.pop()
            if hidden_states is None:
                hidden_states = torch.ones(4, 2, 8).cuda()
            return model(hidden_states), lambda output: (output.mean(), {})

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[None] * (vp or 1),
            model=[model] * (vp or 1),
            num_microbatches=4,
            seq_length=4,
            micro_batch_size=2,
            forward_only=forward_only,
        )
        assert set(scales) == (set() if forward_only else {0.25})
        assert [scaler.main_loss_backward_scale.item() for scaler in SCALERS] == [1.0, 1.0]
