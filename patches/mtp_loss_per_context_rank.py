"""Under context parallelism each rank weighs its MTP loss by its own tokens, not by the sequence's.

Symptom:
    With multi-token prediction (MTP) and context parallelism the gradient of MTP layers depends on
    which rank has which tokens. With two ranks and all tokens counting, a small model's gradient is
    off by 2.3 % of its norm. It is worse if few tokens count: if a rank has no counting tokens of
    its own, but predicts the next rank's first counting token, that token trains nothing. No error.

Cause:
    A rank's last positions predict tokens of the next rank, so the mask is shifted across ranks.
    `process_mtp_loss` divides by the sum of the shifted mask and multiplies by the sum of the mask,
    or only divides if DDP averages. It takes both sums over the rank's own tokens.

Affects:
    0.17 and later. What the patch does: both sums are over all context-parallel ranks. It shifts
    the mask once more, and sums one number per MTP layer, and one more, in one collective. Logged
    MTP losses stay means of the ranks' means. Before 0.17 Megatron adds up losses if
    `calculate_per_token_loss` is set, which is right; if DDP averages, see
    `mtp-loss-without-tokens`.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/d98e8a64ddf34856e74b24714e3bedb2f5a39553/megatron/core/transformer/multi_token_prediction.py
    says in a comment in `process_mtp_loss` that it uses local counts, and that exact parity would
    require all-reduced ones.

Remove when:
    upstream counts over context-parallel ranks, and no release before that is supported.
    `upstream/mtp-loss-per-context-rank` has the repair.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ._case import Fault, Original, Patch, address, arguments, no_body_has, of_context_rank, target

_COUNTED = "original_num_tokens = loss_mask.sum()"
_SHIFTED = (
    "(loss_mask, num_tokens) = roll_tensor(loss_mask, shifts=-1, dims=-1, cp_group=cp_group, "
    "packed_seq_params=packed_seq_params)"
)


def process(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap the MTP loss: divide it by the number of tokens on all context-parallel ranks.
    Upstream divides by this rank's own number. A collective over context-parallel ranks.
    """
    call = arguments(original, args, kwargs)
    group, config = call["cp_group"], call["config"]
    if group is None or group.size() == 1:
        return original(*args, **kwargs)
    from megatron.core.transformer import multi_token_prediction as module

    later = _later(original, args, kwargs)
    shift = _shift(group, call["packed_seq_params"], later)
    mask = _mask(shift, call["loss_mask"], call["labels"], later.get("input_ids"))
    if mask is None:  # upstream computes no loss either
        return original(*args, **kwargs)
    factors = _factors(shift, mask, config, group)
    # With this upstream divides each loss by the rank's own number, and does not multiply it.
    averaged = copy.copy(config)
    averaged.calculate_per_token_loss = False
    upstream_classes = module.MTPLossAutoScaler, module.MTPLossLoggingHelper
    module.MTPLossAutoScaler = _Weighing(upstream_classes[0], factors)
    module.MTPLossLoggingHelper = _logging(upstream_classes[1], config)
    try:
        return _called(original, args, kwargs, config=averaged)
    finally:
        module.MTPLossAutoScaler, module.MTPLossLoggingHelper = upstream_classes


def _later(original: Original, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return, by name, the call's arguments that upstream has only since 0.19.
    They are `input_ids` and `sequence_roll_context`; before 0.19 the dictionary is empty.
    """
    call = arguments(original, args, kwargs)
    return {name: call[name] for name in ("input_ids", "sequence_roll_context") if name in call}


def _called(original: Original, args: Any, kwargs: Any, **overrides: Any) -> Any:
    return original(**{**arguments(original, args, kwargs), **overrides})


def _shift(group: Any, packed: Any, later: dict[str, Any]) -> Callable[[Any], Any]:
    """Return a function that shifts a mask by one position and returns the mask and its sum."""
    from megatron.core.transformer import multi_token_prediction as module

    same = {"shifts": -1, "dims": -1, "cp_group": group, "packed_seq_params": packed}
    if "sequence_roll_context" not in later:
        return partial(module.roll_tensor, **same)
    same |= {"roll_context": later["sequence_roll_context"], "sequence_fields": ["loss_mask"]}
    depth = itertools.count()

    def shift(mask: Any) -> Any:
        (shifted,) = module.roll_tensor([mask], roll_depth=next(depth), **same)
        return shifted, shifted.sum()

    return shift


def _mask(shift: Callable[[Any], Any], mask: Any, labels: Any, tokens: Any) -> Any:
    """Return the loss mask that upstream starts from; None if it computes no MTP loss.
    It computes none without labels and token ids. With token ids alone it shifts the mask once
    first.
    """
    import torch

    if labels is None and tokens is None:
        return None
    if mask is None:
        mask = torch.ones_like(tokens if labels is None else labels)
    # Upstream shifts tokens once to get labels, and the mask with them.
    return shift(mask)[0] if labels is None else mask


def _factors(shift: Callable[[Any], Any], mask: Any, config: Any, group: Any) -> Iterator[Any]:
    """Return an iterator with one factor per MTP layer, by which to multiply this rank's loss.
    Upstream has divided the loss by the rank's own token count. The factor replaces that count by
    the count on all context-parallel ranks, and multiplies by CP; with `calculate_per_token_loss`
    it multiplies by the main loss's token count on these ranks instead.
    """
    import torch

    numbers = [mask.sum()]
    for _ in range(config.mtp_num_layers):
        mask, number = shift(mask)
        numbers.append(number)
    local = torch.stack(numbers).double()
    total = local.clone()
    torch.distributed.all_reduce(total, group=group)
    times = total[0] if config.calculate_per_token_loss else group.size()
    return iter(local[1:].clamp(min=1) * times / total[1:].clamp(min=1))


class _Weighing:
    """Stands in for `MTPLossAutoScaler` in one call; multiplies each MTP layer's loss by a factor.
    The factors come from `_factors`, in the order of the layers.
    """

    def __init__(self, scaler: Any, factors: Iterator[Any]) -> None:
        self._scaler = scaler
        self._factors = factors

    def apply(self, hidden_states: Any, loss: Any) -> Any:
        return self._scaler.apply(hidden_states, loss * next(self._factors).to(loss.dtype))


def _logging(helper: Any, config: Any) -> Any:
    """Return a subclass of Megatron's logging helper that logs with `config`'s per-token option.
    Upstream itself gets a copy of the config in which `calculate_per_token_loss` is off. A helper
    without a method `save_loss_*` is returned unchanged.
    """
    # 0.17, 0.18 and the branch dev have `save_loss_to_tracker`, 0.19 has another name for it.
    name = next(
        (attribute for attribute in vars(helper) if attribute.startswith("save_loss_")), None
    )
    if name is None:
        return helper
    save = getattr(helper, name)

    def saved(*args: Any, **kwargs: Any) -> None:
        if "calculate_per_token_loss" in kwargs:
            kwargs["calculate_per_token_loss"] = config.calculate_per_token_loss
        save(*args, **kwargs)

    return type("Logging", (helper,), {name: staticmethod(saved)})


def reproduce() -> None:
    """Run an MTP model with a loss on one token: one context rank has it, the other predicts it.
    On stock Megatron the MTP layer gets no gradient.
    """
    import torch

    from megatron_idempotent.proof.cpu import tiny
    from megatron_idempotent.step import own_positions

    model = tiny.build(
        cp=2,
        overlap_grad_reduce=False,
        distributed_optimizer=False,
        mtp=1,
        config_overrides={"calculate_per_token_loss": True},
    )
    (chunk,) = model.chunks
    length = tiny.SEQUENCE
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, tiny.VOCABULARY, (1, length), generator=generator).cuda()
    counts = torch.zeros(1, length, device="cuda")
    counts[0, length // 4] = 1  # the first position of the second rank
    mask = own_positions(counts)

    def forward_step(data: Any, chunk: Any) -> Any:
        next(data)
        output = of_context_rank(chunk, tokens, mask)
        return output, lambda output: ((output * mask).sum(), mask.sum().int(), {})

    chunk.zero_grad_buffer()
    model.schedule(iter([None]), 1, forward_step, micro_batch_size=1)
    (layer,) = chunk.module.mtp.layers
    if not layer.eh_proj.weight.main_grad.any():
        raise Fault("an MTP layer learns nothing of a token that another rank counts")


PATCH = Patch(
    "an MTP loss weighs each context-parallel rank's tokens by themselves",
    target("mtp.process_mtp_loss", process, _COUNTED, _SHIFTED),
    since="0.17",
    fixed_when=no_body_has("loss_mask.sum()"),
    fixed_by=(
        (
            address("mtp.process_mtp_loss"),
            "torch.distributed.all_reduce(num_tokens, group=cp_group)",
        ),
    ),
    given=("mtp-without-transformer-engine",),
)
