"""`model_logprobs`: log-probs out of a GPTModel that never makes its logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from torch.nn import Module

from megatron_idempotent.engine.catalogue import patches
from megatron_idempotent.engine.landing import landed

from .api import TokenStats
from .output_layer import scale_of, stats_of
from .sampling import Sampling

_PATCH = "logits-always-built"


def model_logprobs(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    *,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    entropy: Literal["none", "metric", "grad"] = "none",
    token_mask: Tensor | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    workspace_bytes: int | None = None,
    sampling: Sampling | None = None,
    compiled: bool = False,
    triton: bool | None = None,
    **forward: Any,
) -> TokenStats | Tensor:
    """One forward of a GPTModel whose hidden states become log-probs, a part at a time.

    What `token_logprobs` makes of the model's logits, without them: the model is called with an
    `output_processor`, and its output layer with all of its hooks, so that parameters which are
    still being gathered are waited for. Gradients are those of the logits' path. It knows the
    output layer's group, sequence parallelism, a weight that is the embedding's, muP's factor,
    and gradients that are accumulated in `main_grad`.

    All ranks of the tensor-parallel group take part, with the same arguments.

    Args:
        model: a GPTModel, or what it is wrapped in: DistributedDataParallel, Float16Module, FSDP.
        input_ids: [B, S], as of `model.forward`; so are `position_ids` and `attention_mask`.
        targets: [B, S] of int64, the token whose probability is meant at each position. With
            context parallelism those of this rank's positions.
        temperature, entropy, token_mask, ignore_index, vocab_size, workspace_bytes, sampling,
            compiled, triton: as of `token_logprobs`; [B, S] what there is one of for each token.
        forward: other arguments of `model.forward`. MTP heads have their loss in the forward that
            is given `labels` [B, S], and `loss_mask`.

    Returns:
        TokenStats [B, S] on the last pipeline stage; what the stage sends on the others.

    Raises:
        RuntimeError: megatron-core before 0.18 without the patch `logits-always-built`.
        ValueError: a model that is no GPTModel, an output layer that does more than a product with
            its weight, a forward for inference, or what `token_logprobs` refuses.

    Example:
        stats = model_logprobs(model, tokens, positions, mask, targets=shift_targets(tokens))
        loss = -(stats.logprob * advantages).sum()
    """
    gpt = _gpt_in(model)
    processor = logprobs_processor(
        targets=targets,
        temperature=temperature,
        entropy=entropy,
        token_mask=token_mask,
        ignore_index=ignore_index,
        vocab_size=vocab_size,
        workspace_bytes=workspace_bytes,
        sampling=sampling,
        compiled=compiled,
        triton=triton,
    )
    found: list[TokenStats] = []

    def kept(**given: Any) -> TokenStats:
        found.append(processor(**given))
        return found[-1]

    output: Any = model(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=attention_mask,
        output_processor=kept,
        **forward,
    )
    if not gpt.post_process:
        stage: Tensor = output
        return stage
    if len(found) != 1 or not isinstance(output, tuple):
        raise RuntimeError(
            f"the forward of {type(gpt).__qualname__} called its output_processor {len(found)} "
            f"times and returned a {type(output).__name__}: it has to hand it on to GPTModel's "
            "and return what that returns"
        )
    return TokenStats(*output)  # Float16Module makes a tuple of it


def logprobs_processor(
    *,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    **arguments: Any,
) -> Callable[..., TokenStats]:
    """Returns what `model_logprobs` gives the model, for callers who call the model themselves.

    Args:
        targets, temperature, arguments: as of `model_logprobs`; by default as there.

    Returns:
        An `output_processor` for `GPTModel.forward`, and from 0.18 on for `build_schedule_plan`.

    Example:
        stats = model(tokens, positions, mask, output_processor=logprobs_processor(targets=targets))
    """

    def processor(
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None = None,
        scale_logits: Callable[[Tensor], Tensor] | None = None,
        inference_context: Any = None,
        **_: Any,
    ) -> TokenStats:
        if inference_context is not None:
            raise ValueError(
                "log-probs were asked for in a forward with an inference_context, whose hidden "
                "states may be those of some tokens only: call the model without it"
            )
        scale = scale_of(scale_logits)
        given = {**arguments, "targets": targets, "temperature": temperature / scale}
        return stats_of(output_layer, hidden_states, output_weight, given)

    return processor


def _gpt_in(model: Any) -> Any:
    """The GPTModel under wrappers, each of which calls what it holds as `module`."""
    gpt = model
    while not isinstance(gpt, GPTModel) and isinstance(getattr(gpt, "module", None), Module):
        gpt = gpt.module
    if not isinstance(gpt, GPTModel):
        raise ValueError(
            f"model_logprobs() got a {type(gpt).__qualname__}, which has no output_processor as "
            "Megatron's GPTModel: take its logits, and token_logprobs(logits=…)"
        )
    built_in = "output_processor" in inspect.signature(GPTModel.forward).parameters
    if not built_in and not landed(patches()[_PATCH]):
        raise RuntimeError(
            f"this release's GPTModel has no output_processor, and the patch {_PATCH} is not "
            "applied: call megatron_idempotent.apply() and see its report"
        )
    return gpt
