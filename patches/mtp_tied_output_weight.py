"""The last stage of a tied model with MTP has an unused output weight.

Symptom:
    With multi-token prediction (MTP), `share_embeddings_and_output_weights` and several pipeline
    stages, `sharded_state_dict()` raises `AssertionError:
    dict_keys(['decoder.layers.0.input_layernorm.weight', …` in `assert output_layer_weight_key not
    in sharded_state_dict, sharded_state_dict.keys()`: no checkpoint can be written. On 0.12
    `finish_grad_sync` raises `Communication call has not been issued for this bucket` with
    `overlap_grad_reduce`. The weight [vocabulary, hidden size] also takes a gradient buffer and
    optimizer states.

Cause:
    A stage with MTP layers has its own embedding, and its output layer is called with the
    embedding's weight. But the output layer also has a weight of its own, because only the first
    stage builds it without one. The state dict asserts that it has none.

Affects:
    All releases since 0.12, and main. What the patch does: if the stage has an embedding, the
    output layer owns no weight, and its attribute `weight` is the embedding's. Megatron's own
    checkpoints never contain the unused weight. A plain `state_dict()` that was saved without the
    patch contains it: remove `output_layer.weight`. With `gradient_accumulation_fusion` DDP also
    silently dropped the gradient of the MTP layer's lookup in that embedding; the patch marks the
    weight as Megatron does on one stage.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/models/gpt/gpt_model.py,
    `skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights`.

Remove when:
    the output layer is built without a weight in every stage that has an embedding, and no release
    before that is supported. `upstream/mtp-tied-output-weight` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, address, bench, target


def setup(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the set-up of a tied model with MTP: let the output layer use the embedding's weight.
    Upstream's output layer has a weight of its own, which is not used.
    """
    if self.share_embeddings_and_output_weights and getattr(self, "mtp_process", False):
        layer = getattr(self, "output_layer", None)
        if layer is not None and getattr(layer, "weight", None) is not None:
            del layer.weight
            # Not by setattr(), or the layer would own the weight and save it a second time.
            vars(layer)["weight"] = self.shared_embedding_or_output_weight()
            # As upstream does if one stage has both: otherwise a fused gradient of the output layer
            # makes DDP drop the gradient of the MTP layer's lookup.
            self.shared_embedding_or_output_weight().zero_out_wgrad = True
    original(self, *args, **kwargs)


def reproduce() -> None:
    """Make the sharded state dict of a tied two-stage model with an MTP layer.
    On stock Megatron this asserts, because of an unused output weight.
    """
    from megatron.core import parallel_state

    model = bench(pp=2, tied=True, distributed_optimizer=False, overlap_grad_reduce=False, mtp=1)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    try:
        model.chunks[0].module.sharded_state_dict(metadata={"dp_cp_group": group})
    except AssertionError as error:
        raise Fault("the state dict has an unused output weight") from error


PATCH = Patch(
    "a tied model with MTP on several stages cannot be written to a checkpoint",
    target(
        "core.models.common.language_module.language_module:"
        "LanguageModule.setup_embeddings_and_output_layer",
        setup,
        "self.share_embeddings_and_output_weights",
        "self.output_layer.weight",
    ),
    fixed_by=(
        (
            address("core.models.gpt.gpt_model:GPTModel.__init__"),
            "(self.pre_process or self.mtp_process) and self.share_embeddings_and_output_weights",
        ),
    ),
    given=("mtp-without-transformer-engine",),
    loudness="loud",
)
