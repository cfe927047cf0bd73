"""The output layer of a tied model has no weight in any stage that has an embedding."""

from upstream.edits import Repair, after, substitute

_WITHOUT = "skip_weight_param_allocation=self.pre_process"
_WITH = "skip_weight_param_allocation=(self.pre_process or self.mtp_process)"
_LANGUAGE_MODULE = "megatron.core.models.common.language_module.language_module:LanguageModule"

REPAIR = Repair(
    edits=(
        substitute("megatron.core.models.gpt.gpt_model:GPTModel.__init__", _WITHOUT, _WITH),
        substitute(
            "megatron.core.models.hybrid.hybrid_model:HybridModel.__init__", _WITHOUT, _WITH
        ),
        after(
            f"{_LANGUAGE_MODULE}.setup_embeddings_and_output_layer",
            "weight.shared_embedding = True",
            """
            # A fused wgrad of the output layer must not hide that of MTP's embedding lookup.
            weight.zero_out_wgrad = getattr(self, 'mtp_process', False)
            """,
        ),
    ),
    unit_tests=(
        "models/test_gpt_model.py",
        "models/test_hybrid_model.py",
        "transformer/test_multi_token_prediction.py",
    ),
    ranks=2,
)
