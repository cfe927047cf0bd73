"""`output_processor` on releases that have none: as 0.18 calls it, and the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import built, on_ranks, same

from megatron_idempotent.proof.cpu import tiny
from megatron_idempotent.proof.prove import affected


def _model() -> tuple[Any, tuple[Any, ...]]:
    """A tiny GPTModel with all patches, and what it is called with."""
    return built(with_optimizer=False, layers_per_stage=1).chunks[0].module, tiny.inputs(0)


@on_ranks(1)
def test_the_processor_is_called_as_by_upstream():
    """Its arguments, and its result is the forward's."""
    import torch

    model, given_in = _model()
    logits = model(*given_in)
    tokens = given_in[0]
    labels, loss_mask, context = tokens.flip(1), torch.rand(tokens.shape), object()
    given: dict[str, Any] = {}

    def processor(**arguments: Any) -> tuple[str, Any]:
        given.update(arguments)
        layer, weight = arguments["output_layer"], arguments["output_weight"]
        made, _ = layer(arguments["hidden_states"], weight=weight)
        return "mine", arguments["scale_logits"](made)

    name, made = model(
        *given_in,
        labels=labels,
        loss_mask=loss_mask,
        output_processor=processor,
        output_processor_context=context,
    )
    assert name == "mine"
    assert same(made.transpose(0, 1), logits)
    assert set(given) == {
        *("hidden_states", "output_layer", "output_weight", "labels", "loss_mask", "input_ids"),
        *("position_ids", "attention_mask", "decoder_input", "inference_context"),
        *("packed_seq_params", "runtime_gather_output", "context", "compute_language_model_loss"),
        *("scale_logits", "config"),
    }
    assert given["output_layer"] is model.output_layer
    assert (given["labels"], given["loss_mask"], given["context"]) == (labels, loss_mask, context)
    assert (given["input_ids"], given["config"]) == (tokens, model.config)
    loss = given["compute_language_model_loss"](labels, made)
    assert same(loss, model(*given_in, labels=labels))


class InProcessor(Exception):
    """A processor raises this."""


class InDecoder(Exception):
    """The model raises this before its processor is called."""


@on_ranks(1)
def test_the_model_is_as_it_was_behind_a_processor_and_inside_of_one():
    """Forwards that raise, and a processor that runs the model again."""
    model, given = _model()
    logits, before = model(*given), dict(vars(model))

    def raising(error: type[Exception]) -> Any:
        def fail(*_: Any, **__: Any) -> None:
            raise error

        return fail

    def again(**_: Any) -> Any:
        return model(*given), model(*given, output_processor=lambda **_: "inner")

    with pytest.raises(InProcessor):
        model(*given, output_processor=raising(InProcessor))
    assert vars(model) == before
    handle = model.decoder.register_forward_hook(raising(InDecoder))
    with pytest.raises(InDecoder):
        model(*given, output_processor=raising(InProcessor))
    handle.remove()
    assert vars(model) == before
    made, inner = model(*given, output_processor=again)
    assert same(made, logits)
    assert inner == "inner"
    model.compute_language_model_loss = lambda labels, logits: "somebody's loss"
    before = dict(vars(model))
    model(*given, labels=given[0], output_processor=lambda **_: "inner")
    assert vars(model) == before
    assert model(*given, labels=given[0]) == "somebody's loss"


@on_ranks(1)
def test_upstreams_log_of_logits_is_no_obstacle(tmp_path):
    """It has no logits then."""
    model, given = _model()
    model.config.config_logger_dir = str(tmp_path)
    assert model(*given, output_processor=lambda **_: "mine") == "mine"


@pytest.mark.skipif("logits-always-built" not in affected(), reason="it has output_processor")
@on_ranks(1)
def test_a_forward_whose_end_is_another_one_is_told_of():
    """A context for inference may have dropped hidden states, and a subclass has its own end."""
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.models.gpt.gpt_model import GPTModel

    model, given = _model()
    context = StaticInferenceContext(*given[0].shape)
    with pytest.raises(ValueError, match="hidden states"):
        model(*given, output_processor=lambda **_: "mine", inference_context=context)
    if hasattr(GPTModel, "_postprocess"):  # else it makes its logits in one function

        class Own(GPTModel):
            def _postprocess(self, hidden_states: Any, **_: Any) -> Any:
                return hidden_states

        model.__class__ = Own
        with pytest.raises(RuntimeError, match="output_processor"):
            model(*given, output_processor=lambda **_: "mine")
