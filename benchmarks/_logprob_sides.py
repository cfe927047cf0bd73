"""Defines this library, Megatron and plain torch as implementations in the `token_logprobs`
benchmark.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks._logprob_cases import Case, Given, Side


def sides(case: Case) -> list[Side]:
    """Return all implementations that are compared in a case; this library's come first."""
    borrow, consume = (
        Side(name=name, run=_ours_from_logits(name)) for name in ("borrow", "consume")
    )
    of_megatron = _megatron() if case.ranks > 1 else []
    if case.form == "logits":
        return [borrow, consume, *(of_megatron or _torch())]
    through = [
        dataclasses.replace(side, name=f"logits, {side.name}", run=_through_logits(side.run))
        for side in (consume, borrow, *of_megatron)
    ]
    return [Side(name="hidden", run=_ours_from_hidden), *through]


def _ours_from_logits(ownership: str) -> Callable[[Given], tuple[Any, Any]]:
    from megatron_idempotent import token_logprobs

    def run(given: Given) -> tuple[Any, Any]:
        stats = token_logprobs(
            logits=given.inputs[0],
            targets=given.targets,
            token_mask=given.kept,
            tp_group=given.group,
            entropy=given.entropy,
            ownership=ownership,
        )
        return stats.logprob, stats.entropy

    return run


def _ours_from_hidden(given: Given) -> tuple[Any, Any]:
    from megatron_idempotent import token_logprobs

    hidden_NH, weight_VH = given.inputs
    stats = token_logprobs(
        hidden=hidden_NH,
        weight=weight_VH,
        targets=given.targets,
        token_mask=given.kept,
        tp_group=given.group,
        entropy=given.entropy,
    )
    return stats.logprob, stats.entropy


def _through_logits(
    from_logits: Callable[[Given], tuple[Any, Any]],
) -> Callable[[Given], tuple[Any, Any]]:
    """Return an implementation from hidden states: it computes all logits as Megatron's output
    layer does, then calls `from_logits`.
    """

    def run(given: Given) -> tuple[Any, Any]:
        hidden_NH, weight_VH = given.inputs
        if given.group is not None:
            from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

            hidden_NH = copy_to_tensor_model_parallel_region(hidden_NH)
        return from_logits(given._replace(inputs=(hidden_NH @ weight_VH.t(),)))

    return run


def _megatron() -> list[Side]:
    """Return Megatron's two cross entropies as implementations; they compute no entropy.

    Both overwrite float32 logits; they copy logits of other dtypes to float32.
    """
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    def plain(given: Given) -> tuple[Any, Any]:
        logits_N1V, targets_N1 = given.inputs[0][:, None], given.targets[:, None]
        return -vocab_parallel_cross_entropy(logits_N1V, targets_N1)[:, 0], None

    def fused(given: Given) -> tuple[Any, Any]:
        logits_N1V, targets_N1 = given.inputs[0][:, None], given.targets[:, None]
        loss_N1 = fused_vocab_parallel_cross_entropy(logits_N1V, targets_N1, given.group)
        return -loss_N1[:, 0], None

    return [
        Side(name="Megatron", run=plain, entropies=("none",)),
        Side(name="Megatron, fused", run=fused, entropies=("none",)),
    ]


def _torch() -> list[Side]:
    """Return plain torch's implementations: `log_softmax` in float32, eager and compiled."""
    import torch

    def formula(logits_NV: Any, targets_N: Any, wanted: bool) -> tuple[Any, Any]:
        logp_NV = logits_NV.float().log_softmax(-1)
        logprob_N = logp_NV.gather(-1, targets_N[:, None]).squeeze(-1)
        return logprob_N, -(logp_NV.exp() * logp_NV).sum(-1) if wanted else None

    compiled = torch.compile(formula)

    def side(compute: Any) -> Callable[[Given], tuple[Any, Any]]:
        return lambda given: compute(given.inputs[0], given.targets, given.entropy != "none")

    return [Side(name="torch", run=side(formula)), Side(name="torch, compiled", run=side(compiled))]
