"""`output_processor` on releases that have none: as 0.18 calls it, and the model as it was."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_idempotent.proof.prove import affected


def _model() -> tuple[Any, tuple[Any, ...]]:
    """A tiny GPTModel with all patches, and what it is called with."""
    import torch

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply(strict=True)
    (chunk,) = tiny.build(with_optimizer=False, layers_per_stage=1).chunks
    tokens = next(tiny.microbatches(0))
    mask = torch.ones(1, 1, tiny.SEQUENCE, tiny.SEQUENCE).tril() < 0.5
    return chunk.module, (tokens, torch.arange(tiny.SEQUENCE).expand_as(tokens), mask)


def handed_over() -> None:
    """Runs on a rank: the processor's arguments, and that its result is the forward's."""
    import torch

    model, inputs = _model()
    logits = model(*inputs)
    labels, loss_mask, context = inputs[0].flip(1), torch.rand(inputs[0].shape), object()
    given: dict[str, Any] = {}

    def processor(**arguments: Any) -> tuple[str, Any]:
        given.update(arguments)
        layer, weight = arguments["output_layer"], arguments["output_weight"]
        made, _ = layer(arguments["hidden_states"], weight=weight)
        return "mine", arguments["scale_logits"](made)

    name, made = model(
        *inputs,
        labels=labels,
        loss_mask=loss_mask,
        output_processor=processor,
        output_processor_context=context,
    )
    assert name == "mine"
    assert torch.equal(made.transpose(0, 1), logits)
    assert set(given) == {
        "hidden_states",
        "output_layer",
        "output_weight",
        "labels",
        "loss_mask",
        "input_ids",
        "position_ids",
        "attention_mask",
        "decoder_input",
        "inference_context",
        "packed_seq_params",
        "runtime_gather_output",
        "context",
        "compute_language_model_loss",
        "scale_logits",
        "config",
    }
    assert given["output_layer"] is model.output_layer
    assert (given["labels"], given["loss_mask"], given["context"]) == (labels, loss_mask, context)
    assert (given["input_ids"], given["config"]) == (inputs[0], model.config)
    loss = given["compute_language_model_loss"](labels, made)
    assert torch.equal(loss, model(*inputs, labels=labels))


def test_the_processor_is_called_as_by_upstream(megatron_ranks):
    megatron_ranks(1, handed_over)


def put_back() -> None:
    """Runs on a rank: forwards that raise, and a processor that runs the model again."""
    import torch

    model, inputs = _model()
    logits, before = model(*inputs), dict(vars(model))

    def raising(**_: Any) -> None:
        raise ArithmeticError("in the processor")

    def again(**_: Any) -> Any:
        return model(*inputs), model(*inputs, output_processor=lambda **_: "inner")

    with pytest.raises(ArithmeticError, match="in the processor"):
        model(*inputs, output_processor=raising)
    assert vars(model) == before
    handle = model.decoder.register_forward_hook(raising_hook)
    with pytest.raises(ArithmeticError, match="in the decoder"):
        model(*inputs, output_processor=raising)
    handle.remove()
    assert vars(model) == before
    made, inner = model(*inputs, output_processor=again)
    assert torch.equal(made, logits)
    assert inner == "inner"
    model.compute_language_model_loss = lambda labels, logits: "somebody's loss"
    before = dict(vars(model))
    model(*inputs, labels=inputs[0], output_processor=lambda **_: "inner")
    assert vars(model) == before
    assert model(*inputs, labels=inputs[0]) == "somebody's loss"


def raising_hook(*_: Any) -> None:
    raise ArithmeticError("in the decoder")


def test_the_model_is_as_it_was_behind_a_processor_and_inside_of_one(megatron_ranks):
    megatron_ranks(1, put_back)


def logged(folder: str) -> None:
    """Runs on a rank: with upstream's log of inputs and logits on, which has no logits then."""
    model, inputs = _model()
    model.config.config_logger_dir = folder
    assert model(*inputs, output_processor=lambda **_: "mine") == "mine"


def test_upstreams_log_of_logits_is_no_obstacle(megatron_ranks, tmp_path):
    megatron_ranks(1, logged, str(tmp_path))


def inferring() -> bool:
    """Runs on a rank: a context for inference. Whether this release may drop hidden states for
    it."""
    from megatron.core.inference.contexts import StaticInferenceContext

    model, inputs = _model()
    context = StaticInferenceContext(*inputs[0].shape)
    if "logits-always-built" not in affected():
        return False
    with pytest.raises(ValueError, match="may have dropped hidden states by then"):
        model(*inputs, output_processor=lambda **_: "mine", inference_context=context)
    return True


def test_hidden_states_of_some_tokens_are_no_processors(megatron_ranks):
    if not megatron_ranks(1, inferring)[0]:
        pytest.skip("this release has output_processor")


def rewritten() -> bool:
    """Runs on a rank: somebody's own end of the forward. Whether this release has an end of its
    own."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    if not hasattr(GPTModel, "_postprocess") or "logits-always-built" not in affected():
        return False
    model, inputs = _model()

    class Own(GPTModel):
        def _postprocess(self, hidden_states: Any, **_: Any) -> Any:
            return hidden_states

    model.__class__ = Own
    with pytest.raises(RuntimeError, match="so that output_processor was not called"):
        model(*inputs, output_processor=lambda **_: "mine")
    return True


def test_a_forward_that_ends_otherwise_is_told_of(megatron_ranks):
    if not megatron_ranks(1, rewritten)[0]:
        pytest.skip("this release has output_processor, or makes its logits in one function")
