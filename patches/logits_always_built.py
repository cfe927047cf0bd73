"""GPTModel computes its logits even for a caller that needs only the hidden states before them.

Symptom:
    A loss of log-probs cannot avoid the logits, the largest tensor of a step: [S, B, V / TP], and
    as much again for the gradient. `TypeError: … got an unexpected keyword argument
    'output_processor'` from a program for 0.18 that passes a processor for the hidden states.

Cause:
    `GPTModel.forward` ends in the output layer; `output_processor` came with 0.18.

Affects:
    Releases before 0.18. What the patch does: `forward` takes `output_processor` and
    `output_processor_context` as 0.18 does, and calls the processor instead of the output layer
    with 0.18's arguments; `decoder_input` is the caller's, not the embeddings. MTP heads use the
    output layer as before. An inference forward with a processor raises, because some of these
    releases have dropped hidden states before the output layer. `build_schedule_plan` takes no
    processor.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/4686, in 0.18.

Remove when:
    0.17 is no longer supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ._case import Fault, Original, Patch, a_body_has, arguments, target


class _Logits:
    """Stands in for a model's logits; `compute()` computes them from the hidden states."""

    def __init__(self, layer: Any, hidden_states: Any, weight: Any, gather: Any) -> None:
        self.hidden_states, self.weight = hidden_states, weight
        self._layer, self._gather = layer, gather
        self._scale: Callable[[Any], Any] = _unscaled

    def compute(self) -> Any:
        logits, _ = self._layer(
            self.hidden_states, weight=self.weight, runtime_gather_output=self._gather
        )
        return self._scale(logits)

    def scaled(self, scale: Callable[[Any], Any]) -> _Logits:
        self._scale = scale
        return self

    def transpose(self, *_: int) -> _Logits:
        return self

    def contiguous(self) -> _Logits:
        return self

    def __reduce__(self) -> Any:
        return str, ("not made",)  # for upstream's log of inputs and logits


class _OutputLayer:
    """Stands in for the output layer in a forward: returns `_Logits`, and computes no logits."""

    def __init__(self, layer: Any, labels: Any) -> None:
        self._layer, self._labels = layer, labels

    def __call__(
        self, input_: Any, weight: Any = None, runtime_gather_output: Any = None, **fused: Any
    ) -> Any:
        logits = _Logits(self._layer, input_, weight, runtime_gather_output)
        if not fused:
            return logits, None
        if fused["labels"] is self._labels:  # the model's own loss, which the processor computes
            return logits
        return self._layer(
            input_, weight=weight, runtime_gather_output=runtime_gather_output, **fused
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def forward(
    original: Original,
    self: Any,
    *args: Any,
    output_processor: Callable[..., Any] | None = None,
    output_processor_context: Any = None,
    **kwargs: Any,
) -> Any:
    """Run GPTModel's forward; with `output_processor`, call the processor with the hidden states.
    The processor is called instead of the output layer, and its result is returned.
    """
    if output_processor is None or not self.post_process:
        return original(self, *args, **kwargs)
    call = arguments(original, (self, *args), kwargs)
    if call["inference_context"] is not None or call["inference_params"] is not None:
        raise ValueError(
            "GPTModel.forward() got output_processor and an inference_context, with which this "
            "release may have dropped hidden states by then: leave one of them out"
        )
    with _without_logits(self, call["labels"]):
        logits = original(self, *args, **kwargs)
    if not isinstance(logits, _Logits):
        raise RuntimeError(
            f"this GPTModel's forward made a {type(logits).__name__} of its own out of the output "
            "layer, so that output_processor was not called: exclude logits-always-built"
        )
    return output_processor(
        hidden_states=logits.hidden_states,
        output_layer=self.output_layer,
        output_weight=logits.weight,
        scale_logits=getattr(self, "_scale_logits", _unscaled),
        compute_language_model_loss=self.compute_language_model_loss,
        context=output_processor_context,
        config=self.config,
        **{name: call[name] for name in _HANDED_ON},
    )


_HANDED_ON = (
    "labels",
    "loss_mask",
    "input_ids",
    "position_ids",
    "attention_mask",
    "decoder_input",
    "inference_context",
    "packed_seq_params",
    "runtime_gather_output",
)


@contextmanager
def _without_logits(model: Any, labels: Any) -> Iterator[None]:
    """Let the model's forward keep hidden states instead of computing logits, during the block.

    A loss of these very `labels` is the model's own; MTP heads compute losses of rolled labels.

    A stand-in is an attribute of the instance, which is found before its modules and methods.
    """
    loss, scale = model.compute_language_model_loss, getattr(model, "_scale_logits", _unscaled)

    def loss_of(of_labels: Any, logits: _Logits) -> Any:
        return logits if of_labels is labels else loss(of_labels, logits.compute())

    standing_in = {
        "output_layer": _OutputLayer(model.output_layer, labels),
        "compute_language_model_loss": loss_of,
        "_scale_logits": lambda logits: logits.scaled(scale),  # from 0.17 on
    }
    attributes = vars(model)
    replaced = {name: attributes[name] for name in standing_in if name in attributes}
    attributes.update(standing_in)
    try:
        yield
    finally:
        for name in standing_in:
            del attributes[name]
        attributes.update(replaced)


def _unscaled(logits: Any) -> Any:
    return logits


def reproduce() -> None:
    """Compute logits in an `output_processor`, from the hidden states that it gets.
    On stock Megatron before 0.18 the forward does not take that argument.
    """
    model, inputs = _model()
    (chunk,) = model.chunks

    def processor(hidden_states: Any, output_layer: Any, output_weight: Any, **_: Any) -> Any:
        return output_layer(hidden_states, weight=output_weight)[0].transpose(0, 1)

    logits = chunk(*inputs, labels=inputs[0], output_processor=processor)
    if not logits.equal(chunk(*inputs)):
        raise Fault("a processor computes other logits than the model")


def control() -> object:
    """Run the model without an `output_processor`, as a control.
    Return the bytes of logits, losses and gradients.
    """
    model, inputs = _model()
    (chunk,) = model.chunks
    outputs = [chunk(*inputs), chunk(*inputs, labels=inputs[0])]
    model.forward_backward(2, data_seed=0)
    return [tensor.detach().numpy().tobytes() for tensor in (*outputs, model.gradients())]


def _model() -> tuple[Any, tuple[Any, ...]]:
    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(with_optimizer=False, overlap_grad_reduce=False)
    return model, tiny.inputs(0)


PATCH = Patch(
    "before 0.18 a loss of log-probs cannot have hidden states instead of logits",
    # Reviewed together with the functions that they call: `_postprocess` from 0.13 on, the MTP
    # block.
    target("core.models.gpt.gpt_model:GPTModel.forward", forward),
    before="0.18",
    provides=("output-processor",),
    fixed_when=a_body_has("output_processor"),
    ranks=1,
    stock_error=r"TypeError: .*unexpected keyword argument 'output_processor'",
)
