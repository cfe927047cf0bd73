"""Models and output layers of which hidden states and a weight do not tell all."""

from __future__ import annotations

import copy

import models
import pytest
import torch
from ranks import on_ranks

from megatron_idempotent.proof.cpu import tiny


@on_ranks(1)
def test_an_output_layer_that_does_more_is_refused_and_left_as_it_was() -> None:
    """Output layers that do more, each refused before anything is computed."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    (chunk,) = models.build(layers_per_stage=1).chunks
    gpt = chunk.module
    tokens, arguments = models.case()
    plain = gpt.output_layer

    class Capped(ColumnParallelLinear):
        def forward(self, *args, **kwargs):
            logits, bias = super().forward(*args, **kwargs)
            return logits.tanh(), bias

    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.to_wrap = plain

        def forward(self, *args, **kwargs):
            return self.to_wrap(*args, **kwargs)

    def changed(**attributes):
        layer = copy.copy(plain)
        layer.__dict__["_parameters"] = dict(plain._parameters)
        for name, value in attributes.items():
            setattr(layer, name, value)
        return layer

    capped = changed()
    capped.__class__ = Capped
    deferring = copy.copy(plain.config)
    deferring.defer_embedding_wgrad_compute = True
    refused = {
        r"is a test_model_refused.*Adapted, not Megatron's ColumnParallelLinear": Adapted(),
        r"\(test_model_refused.*Capped\) has a forward that is not": capped,
        r"\(megatron.*ColumnParallelLinear\) has a forward that is not": changed(forward=print),
        r"has a bias": changed(bias=torch.nn.Parameter(torch.zeros(1))),
        r"has disable_grad_reduce=True": changed(disable_grad_reduce=True),
        r"of which 2 ranks have a piece each": changed(gtp_remat_size=2),
        r"defer_embedding_wgrad_compute=True .* set it to False": changed(config=deferring),
    }
    for message, layer in refused.items():
        gpt.output_layer = layer
        before = dict(vars(layer))
        with pytest.raises(ValueError, match=message):
            models.from_hidden(chunk, tokens, arguments)
        assert vars(layer) == before
    with torch.no_grad():  # where nothing is to be deferred
        models.from_hidden(chunk, tokens, arguments)
    gpt.output_layer = plain
    models.from_hidden(chunk, tokens, arguments)


@on_ranks(1)
def test_models_that_would_give_something_else_are_refused() -> None:
    """No GPTModel, one whose forward keeps the processor to itself, inference."""
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.models.gpt.gpt_model import GPTModel

    (chunk,) = models.build(layers_per_stage=1).chunks
    tokens, arguments = models.case()
    with pytest.raises(ValueError, match="got a Linear, which has no output_processor"):
        models.from_hidden(torch.nn.Linear(1, 1), tokens, arguments)
    with pytest.raises(ValueError, match=r"targets of shape \(2, 31\), .* 2 rows with 32 pos"):
        models.from_hidden(chunk, tokens, {**arguments, "targets": tokens[:, 1:]})
    context = StaticInferenceContext(tokens.shape[0], tokens.shape[1])
    with pytest.raises(ValueError, match="an inference_context"):
        models.from_hidden(chunk, tokens, arguments, inference_context=context)

    class Own(GPTModel):
        def forward(self, *args, output_processor=None, **kwargs):
            return super().forward(*args, **kwargs)

    chunk.module.__class__ = Own
    with pytest.raises(RuntimeError, match=r"forward of .*Own called its output_processor 0 times"):
        models.from_hidden(chunk, tokens, arguments)


def without_patches() -> str:
    """Runs on a rank: what it says where nothing is applied; empty where the release needs
    nothing."""
    torch.manual_seed(0)
    (chunk,) = tiny.build(with_optimizer=False, layers_per_stage=1).chunks
    tokens, arguments = models.case()
    try:
        models.from_hidden(chunk, tokens, arguments)
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_older_release_asks_for_its_patch(megatron_ranks):
    from megatron_idempotent.proof.prove import affected

    (said,) = megatron_ranks(1, without_patches)
    if "logits-always-built" in affected():
        assert "not applied: logits-always-built (disabled: " in said
        assert "Call megatron_idempotent.apply()" in said
    else:
        assert said == ""


@on_ranks(1)
def test_a_temperature_that_is_no_number_is_refused_before_the_forward() -> None:
    from megatron_idempotent.logprobs import logprobs_processor

    with pytest.raises(ValueError, match=r"model_logprobs\(\) got temperature='0.7': pass a"):
        logprobs_processor(targets=torch.zeros(2, 3, dtype=torch.int64), temperature="0.7")
