import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_trace import RouterTracer
from megatron.core.transformer.spec_utils import get_submodules
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils


class TestRegisterHooksAgain:
    def setup_method(self, method):
        Utils.initialize_model_parallel(1, 1)

    def teardown_method(self, method):
        Utils.destroy_model_parallel()

    def get_model(self):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=12,
            num_attention_heads=4,
            num_moe_experts=4,
            moe_router_load_balancing_type="none",
            use_cpu_initialization=True,
            add_bias_linear=False,
        )
        submodules = get_submodules(
            get_gpt_layer_local_submodules(num_experts=4, moe_grouped_gemm=False).mlp
        )
        return torch.nn.ModuleDict({"mlp": MoELayer(config, submodules)})

    def test_one_hook_per_router(self, tmp_path):
        tracer = RouterTracer(str(tmp_path), max_steps=10, rank=0, training_mode=True)
        model, other = self.get_model(), self.get_model()
        for chunks in (model, [model], [model, other]):
            tracer.register_hooks(chunks)
        for chunk in (model, other):
            assert len(chunk["mlp"].router._forward_hooks) == 1
        tracer.remove_hooks()
        tracer.register_hooks(model)
        assert len(model["mlp"].router._forward_hooks) == 1
        assert not other["mlp"].router._forward_hooks
