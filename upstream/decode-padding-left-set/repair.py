"""MoE layers have their own padding back in their first forward outside of inference."""

from upstream.edits import Repair, before, replace, substitute

_UTILS = "megatron.core.inference.utils"
_SET = f"{_UTILS}:set_decode_expert_padding"
_LAYER = "megatron.core.transformer.moe.moe_layer"

REPAIR = Repair(
    edits=(
        replace(_SET, "global moe_layer_cache", ""),
        replace(
            _SET,
            "if moe_layer_cache is None",
            """
            from megatron.core.transformer.moe.moe_layer import MoELayer

            if not hasattr(model, '_moe_layers'):
                model._moe_layers = [m for m in model.modules() if isinstance(m, MoELayer)]
            """,
        ),
        before(
            _SET,
            "cfg.moe_pad_expert_input_to_capacity",
            """
            # Kept for MoELayer.forward(), until the inference engine has left the model.
            padding = cfg.moe_pad_expert_input_to_capacity, cfg.moe_expert_capacity_factor
            for moe_layer in model._moe_layers:
                if not hasattr(moe_layer, '_padding_before_decode'):
                    moe_layer._padding_before_decode = padding

            """,
        ),
        substitute(_SET, "in moe_layer_cache", "in model._moe_layers"),
        before(
            _UTILS,
            "def check_flashinfer_jit_cache_installed(",
            '''
            def restore_expert_padding(moe_layer):
                """Undo set_decode_expert_padding() for an MoE layer."""
                pad, capacity_factor = moe_layer._padding_before_decode
                del moe_layer._padding_before_decode
                dispatcher = moe_layer.token_dispatcher
                dispatcher.drop_and_pad = pad
                dispatcher.moe_expert_capacity_factor = capacity_factor
                for config in (moe_layer.config, dispatcher.config, moe_layer.router.config):
                    config.moe_pad_expert_input_to_capacity = pad
                    config.moe_expert_capacity_factor = capacity_factor


            ''',
        ),
        substitute(_LAYER, "import InferenceMode", "import InferenceMode, restore_expert_padding"),
        before(
            f"{_LAYER}:MoELayer.forward",
            "if padding_mask is not None",
            """
            if hasattr(self, "_padding_before_decode") and not InferenceMode.is_active():
                restore_expert_padding(self)
            """,
        ),
    ),
    unit_tests=("transformer/moe/test_moe_layer.py",),
    leaves="overlapped 1F1B runs parts of MoE layers, and restores nothing",
)
