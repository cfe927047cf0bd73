"""The last stage of a tied model with MTP has an output weight that nothing uses.

Symptom:
    With multi-token prediction (MTP), `share_embeddings_and_output_weights` and several pipeline
    stages, `sharded_state_dict()` raises `AssertionError:
    dict_keys(['decoder.layers.0.input_layernorm.weight', …` in `assert output_layer_weight_key not
    in sharded_state_dict, sharded_state_dict.keys()`: no checkpoint can be written. On 0.12
    `finish_grad_sync` raises `Communication call has not been issued for this bucket` with
    `overlap_grad_reduce`. The weight, of the vocabulary times the hidden size, has a gradient
    buffer and states of the optimizer.

Cause:
    A stage with MTP layers has an embedding of its own, and its output layer is called with the
    embedding's weight. The output layer has a weight all the same, as it is built without one in
    the first stage alone. The state dict asserts that there is none.

Affects:
    All releases since 0.12, and main. What the patch does: where the stage has an embedding, the
    output layer owns no weight, and its attribute is the embedding's. Megatron's own checkpoints
    never have it. A plain `state_dict()` that was saved before has it: leave `output_layer.weight`
    out. With `gradient_accumulation_fusion` DDP also left out the gradient of the MTP layer's
    lookup in that embedding, silently; the weight is marked as Megatron marks it on one stage.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/models/gpt/gpt_model.py,
    `skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights`.

Remove when:
    the output layer is built without a weight in every stage that has an embedding, and no release
    before that is supported.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, bench, target


def setup(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Set up a model whose output layer owns a weight only if it uses it."""
    if self.share_embeddings_and_output_weights and getattr(self, "mtp_process", False):
        layer = getattr(self, "output_layer", None)
        if layer is not None and getattr(layer, "weight", None) is not None:
            del layer.weight
            # Not by setattr(), with which the layer would own it, and save it a second time.
            vars(layer)["weight"] = self.shared_embedding_or_output_weight()
            # As upstream does where one stage has both: or a fused gradient of the output layer
            # makes DDP leave out that of the MTP layer's lookup.
            self.shared_embedding_or_output_weight().zero_out_wgrad = True
    original(self, *args, **kwargs)


def reproduce() -> None:
    """Make the state dict of a tied model with an MTP layer on two stages."""
    from megatron.core import parallel_state

    model = bench(pp=2, tied=True, distributed_optimizer=False, overlap_grad_reduce=False, mtp=1)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    try:
        model.chunks[0].module.sharded_state_dict(metadata={"dp_cp_group": group})
    except AssertionError as error:
        raise Fault("the state dict has an output weight that nothing uses") from error


PATCH = Patch(
    "a tied model with MTP on several stages cannot be written to a checkpoint",
    target(
        "core.models.common.language_module.language_module:"
        "LanguageModule.setup_embeddings_and_output_layer",
        setup,
        "self.share_embeddings_and_output_weights",
        "self.output_layer.weight",
    ),
    given=("mtp-without-transformer-engine",),
)
