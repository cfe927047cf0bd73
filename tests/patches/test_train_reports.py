"""Reports of windows: losses as the loss function said them, routing decisions once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_idempotent.patching.source import locate

MICROBATCHES = 4


def window(loss_func: Callable[[Any], Any], **options: Any) -> tuple[list[Any], bytes]:
    """Runs on a rank: a window's reports under the patches, and the gradients' bytes."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply()
    model = tiny.build(overlap_grad_reduce=False, with_optimizer=False)
    data = tiny.microbatches(0)
    positions_BT = torch.arange(tiny.SEQUENCE).expand(tiny.BATCH, -1)
    hidden = torch.ones(1, 1, tiny.SEQUENCE, tiny.SEQUENCE).tril() < 0.5

    def forward_step(data_iterator: Any, chunk: Any) -> tuple[Any, Any]:
        tokens_BT = next(data_iterator)
        return chunk(tokens_BT, positions_BT, hidden, labels=tokens_BT), loss_func

    model.chunks[0].zero_grad_buffer()
    reports: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model.chunks,
        num_microbatches=MICROBATCHES,
        seq_length=tiny.SEQUENCE,
        micro_batch_size=tiny.BATCH,
        **options,
    )
    return reports, model.gradients().numpy().tobytes()


def reported(alias: bool, with_tokens: bool) -> tuple[list[float], list[float], bytes]:
    """Runs on a rank: losses, what was reported of them, and the gradients."""
    import torch

    losses = []

    def loss_func(loss_BT: Any) -> Any:
        loss = loss_BT.float().sum() if with_tokens else loss_BT.float().mean()
        losses.append(loss.item())
        report = {"loss": loss.detach() if alias else loss.detach().clone()}
        tokens = torch.tensor(loss_BT.numel(), dtype=torch.int)
        return (loss, tokens, report) if with_tokens else (loss, report)

    reports, gradients = window(loss_func)
    return losses, [report["loss"].item() for report in reports], gradients


@pytest.mark.parametrize("with_tokens", [False, True])
def test_an_aliased_report_is_the_loss_and_the_gradients_stay(with_tokens, megatron_ranks):
    ((losses, reports, gradients),) = megatron_ranks(1, reported, True, with_tokens)
    assert reports == losses
    assert len(set(losses)) == MICROBATCHES
    assert gradients == megatron_ranks(1, reported, False, with_tokens)[0][2]


def reports_of_its_own() -> bool:
    """Runs on a rank: reports that do not share memory with the loss come back as they were
    given."""
    given = []

    def loss_func(loss_BT: Any) -> Any:
        loss = loss_BT.float().mean()
        given.append({"loss": loss.detach().clone(), "tokens": loss_BT.numel()})
        return loss, given[-1]

    reports, _ = window(loss_func)
    return all(got is gave for got, gave in zip(reports, given, strict=True))


def test_a_report_without_an_alias_is_the_very_same_object(megatron_ranks):
    assert megatron_ranks(1, reports_of_its_own) == [True]


def log_probs() -> list[tuple[int, ...]]:
    """Runs on a rank: data that is no loss, as a forward-only pass collects it."""

    def collect(loss_BT: Any, non_loss_data: bool = False) -> Any:
        assert non_loss_data
        return loss_BT.detach()

    reports, _ = window(collect, forward_only=True, collect_non_loss_data=True)
    return [tuple(report.shape) for report in reports]


def test_data_that_is_no_loss_passes_through(megatron_ranks):
    assert megatron_ranks(1, log_probs) == [[(2, 32)] * MICROBATCHES]


def trace_two_models(folder: str) -> tuple[int, int]:
    """Runs on a rank: hooks per router after registering model a, b and a again."""
    from megatron.core.transformer.moe import router_trace

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply()
    a, b = (tiny.build(experts=4, with_optimizer=False) for _ in "ab")
    router_trace.init_moe_router_tracer(folder, max_steps=10, rank=0, training_mode=True)
    tracer = router_trace.get_moe_router_tracer()
    for model in (a, b, a):
        tracer.register_hooks(model.chunks)

    def most(model: Any) -> int:
        return max(len(module._forward_hooks) for module in model.chunks[0].modules())

    return most(a), most(b)


@pytest.mark.skipif(
    locate("megatron.core.transformer.moe.router_trace") is None,
    reason="this release has no router trace",
)
def test_each_router_of_either_model_is_traced_once(megatron_ranks, tmp_path):
    assert megatron_ranks(1, trace_two_models, str(tmp_path)) == [(1, 1)]
