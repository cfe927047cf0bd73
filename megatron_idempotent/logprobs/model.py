"""`model_logprobs` computes log-probs with a GPTModel, without its logits in memory.

Megatron's output layer is called with the hidden states as usual, and returns log-probs.

Legend: B batch, S positions, H features, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor
from torch.nn import Module

from megatron_idempotent.megatron.expert_replay import ExpertReplay
from megatron_idempotent.patching.needs import absent, is_provided

from .api import TokenStats, token_logprobs
from .errors import misfit, number
from .truncated_vocab import Sampling

_INSTEAD = "take the logits, and token_logprobs(logits=…)"


def _stats_of(
    layer: Any, hidden_SBH: Tensor, output_weight: Tensor | None, arguments: dict[str, Any]
) -> TokenStats:
    """Call the output layer, but compute `token_logprobs` instead of logits.
    Return the `TokenStats`, [B, S] like the targets.

    The module's hooks run as usual: DDP's, which waits for parameters that are still being gathered
    and starts the next gather, and FSDP2's, which unshards parameters.

    Raises:
        ValueError: a layer that does more than a product with its weight, or arguments that do not
            fit.
    """
    _accept(layer)
    # A layer knows its group from 0.13 on.
    group = getattr(layer, "tp_group", None)
    group = parallel_state.get_tensor_model_parallel_group() if group is None else group
    pieces = group.size() if layer.sequence_parallel else 1
    shape_BS = hidden_SBH.shape[1], hidden_SBH.shape[0] * pieces
    arguments = {name: _transposed(name, value, shape_BS) for name, value in arguments.items()}

    def forward(
        hidden_SBH: Tensor, weight: Tensor | None = None, **_: Any
    ) -> tuple[TokenStats, None]:
        weight_VH = layer.weight if weight is None else weight
        recorded = torch.is_grad_enabled() and weight_VH.requires_grad
        if recorded and layer.config.defer_embedding_wgrad_compute:
            raise ValueError(
                "config.defer_embedding_wgrad_compute=True keeps logit gradients for the end of "
                f"the window, and here there are none: set it to False, or {_INSTEAD}"
            )
        stats_SB = token_logprobs(
            hidden=hidden_SBH,
            weight=weight_VH,
            tp_group=group,
            hidden_layout="sequence_parallel" if layer.sequence_parallel else "replicated",
            gradient_accumulation_fusion=recorded and layer.gradient_accumulation_fusion,
            **arguments,
        )
        stats_BS: Any = (x if x is None else x.transpose(0, 1).contiguous() for x in stats_SB)
        return TokenStats(*stats_BS), None

    # Set on the instance: the module's __call__ uses it instead of the class's method.
    layer.forward = forward
    try:
        stats, _ = layer(hidden_SBH, weight=output_weight)
    finally:
        del layer.forward
    if not isinstance(stats, TokenStats):
        raise RuntimeError(
            f"a forward hook of the output layer made a {type(stats).__name__} of its "
            f"TokenStats: remove the hook, or {_INSTEAD}"
        )
    return stats


def _scale_of(scale_logits: Callable[[Tensor], Tensor] | None) -> float:
    """Return the factor by which the model multiplies its logits after the output layer (muP).

    Raises:
        ValueError: the model does more than to multiply its logits by one positive number.
    """
    if scale_logits is None:
        return 1.0
    probe = torch.tensor([1.0, -64.0, 0.5], dtype=torch.float64, device="cpu")
    scaled = scale_logits(probe.clone())
    scale = float(scaled[0])
    if not 0 < scale < float("inf") or not torch.equal(scaled, probe * scale):
        raise ValueError(
            f"the model's scale_logits makes {scaled.tolist()} of logits {probe.tolist()}, not "
            f"their product with a positive number: {_INSTEAD}"
        )
    return scale


def _accept(layer: Any) -> None:
    """Raise `ValueError` unless the output layer is a product with its weight and nothing else."""
    kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
    reason = None
    if not isinstance(layer, ColumnParallelLinear):
        reason = f"is a {kind}, not Megatron's ColumnParallelLinear"
    elif "forward" in vars(layer) or type(layer).forward is not ColumnParallelLinear.forward:
        reason = f"({kind}) has a forward that is not ColumnParallelLinear's"
    elif layer.bias is not None:
        reason = "has a bias"
    elif layer.disable_grad_reduce:
        reason = "has disable_grad_reduce=True, so its input's gradient is to stay a share"
    elif getattr(layer, "gtp_remat_size", 1) > 1:
        reason = f"has a weight of which {layer.gtp_remat_size} ranks have a piece each (gtp_remat)"
    if reason is not None:
        raise ValueError(
            f"the output layer {reason}; log-probs out of hidden states know a product with a "
            f"weight and nothing else: {_INSTEAD}"
        )


def _transposed(name: str, value: Any, shape_BS: tuple[int, int]) -> Any:
    """Transpose values [B, S, ...] per token to [S, B, ...], the order of the hidden states."""
    if isinstance(value, Sampling) and value.keep is not None:
        keep = _transposed("sampling.keep", value.keep, shape_BS)
        return dataclasses.replace(value, keep=keep)
    if not isinstance(value, Tensor):
        return value
    if value.shape[:2] != shape_BS:
        hidden = f"hidden states of {shape_BS[0]} rows with {shape_BS[1]} positions"
        argument = f"{name} of shape {tuple(value.shape)}, and {hidden}"
        raise misfit("model_logprobs", argument, "pass it with these two dimensions first")
    return value.transpose(0, 1)


_PROVIDED = "output-processor"


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
    triton: bool | None = None,
    routed_experts: Tensor | None = None,
    **forward: Any,
) -> TokenStats | Tensor:
    """Run one forward of a GPTModel, and compute log-probs from its last hidden states, without
    ever having the logits of all tokens in memory.

    The result, and the gradients, are those of `token_logprobs` with the model's logits, which are
    never made. The model is called with an `output_processor`, and its output layer with all of its
    hooks, so that parameters which are still being gathered are waited for. The output layer's
    group, sequence parallelism, a weight shared with the embedding, muP's factor and gradients
    that accumulate in `main_grad` are taken from the model.

    All ranks of the tensor-parallel group take part, with the same arguments.

    Args:
        model: a GPTModel, or what it is wrapped in: DistributedDataParallel, Float16Module, FSDP.
        input_ids: [B, S], as of `model.forward`; so are `position_ids` and `attention_mask`.
        targets: [B, S] of int64 or int32, each position's target, or [B, S, K] for K of them, such
            as a teacher's tokens. With context parallelism those of this rank's positions.
        temperature, entropy, token_mask, ignore_index, vocab_size, workspace_bytes, sampling,
            triton: as of `token_logprobs`; values for each token are [B, S].
        routed_experts: [B, S, layers with routers, experts of a token], the experts that routers
            take, of this rank's positions under context parallelism; see `step.ExpertReplay`.
        forward: other arguments of `model.forward`. MTP heads have their loss in the forward that
            is given `labels` [B, S], and `loss_mask`.

    Returns:
        TokenStats [B, S] on the last pipeline stage; on others the hidden states that the stage
        sends to the next.

    Raises:
        RuntimeError: megatron-core before 0.18 without the patch `logits-always-built`, a hook or a
            model that does not hand the stats on.
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
        triton=triton,
    )
    calls = 0

    def counted(**inputs: Any) -> TokenStats:
        nonlocal calls
        calls += 1
        return processor(**inputs)

    run = functools.partial(
        model,
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=attention_mask,
        output_processor=counted,
        **forward,
    )
    if routed_experts is None:
        output = run()
    else:
        replay = ExpertReplay([model], of="model_logprobs()")
        output = replay.run(model, routed_experts, run)
    if not gpt.post_process:
        stage: Tensor = output
        return stage
    if calls != 1 or not isinstance(output, tuple):
        raise RuntimeError(
            f"the forward of {type(gpt).__qualname__} called its output_processor {calls} "
            f"times and returned a {type(output).__name__}: it has to hand it on to GPTModel's "
            "and return what that returns"
        )
    return TokenStats(*output)  # Float16Module turns it into a tuple


def logprobs_processor(
    *,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    **arguments: Any,
) -> Callable[..., TokenStats]:
    """Return an `output_processor` that has a GPTModel's forward return log-probs, for callers who
    call the model themselves.

    Args:
        targets, temperature, arguments: as of `model_logprobs`, with the same defaults.

    Raises:
        ValueError: a temperature that is no number.

    Returns:
        An `output_processor` for `GPTModel.forward`, and from 0.18 on for `build_schedule_plan`.

    Example:
        stats = model(tokens, positions, mask, output_processor=logprobs_processor(targets=targets))
    """
    number("model_logprobs", temperature)

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
        of_tokens = {"targets": targets, "temperature": temperature / _scale_of(scale_logits)}
        return _stats_of(output_layer, hidden_states, output_weight, {**arguments, **of_tokens})

    return processor


def _gpt_in(model: Any) -> Any:
    """Return the GPTModel inside of `model`, which may be in wrappers such as DDP.
    Each wrapper holds the next one as `module`.
    """
    gpt = model
    while not isinstance(gpt, GPTModel) and isinstance(getattr(gpt, "module", None), Module):
        gpt = gpt.module
    if not isinstance(gpt, GPTModel):
        reason = f"a {type(gpt).__qualname__}, which has no output_processor as Megatron's GPTModel"
        raise misfit("model_logprobs", reason, "take its logits, and token_logprobs(logits=…)")
    built_in = "output_processor" in inspect.signature(GPTModel.forward).parameters
    if not built_in and not is_provided(_PROVIDED):
        raise RuntimeError(
            "this release's GPTModel has no output_processor, and the patch that gives it one is "
            f"not applied: {' or '.join(absent(_PROVIDED, a_door=True)) or 'there is none'}. "
            "Call megatron_idempotent.apply() and see its report"
        )
    return gpt
