"""Reports of windows: losses as the loss function said them, routing decisions once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ranks import built, digest, on_ranks

from megatron_idempotent.patching.source import locate

MICROBATCHES = 4


def window(loss_func: Callable[[Any], Any], **options: Any) -> tuple[list[Any], str]:
    """A window's reports under the patches, and a digest of the gradients."""
    from megatron_idempotent.proof.cpu import tiny

    model = built(overlap_grad_reduce=False, with_optimizer=False)
    _, positions_BT, hidden = tiny.inputs(0)

    def forward_step(data_iterator: Any, chunk: Any) -> tuple[Any, Any]:
        tokens_BT = next(data_iterator)
        return chunk(tokens_BT, positions_BT, hidden, labels=tokens_BT), loss_func

    model.chunks[0].zero_grad_buffer()
    reports = model.schedule(
        tiny.microbatches(0), MICROBATCHES, forward_step=forward_step, **options
    )
    return reports, digest(model.gradients())


@pytest.mark.parametrize("with_tokens", [False, True])
@on_ranks(1)
def test_an_aliased_report_is_the_loss_and_the_gradients_stay(with_tokens):
    import torch

    def gradients(alias: bool) -> str:
        losses = []

        def loss_func(loss_BT: Any) -> Any:
            loss = loss_BT.float().sum() if with_tokens else loss_BT.float().mean()
            losses.append(loss.item())
            report = {"loss": loss.detach() if alias else loss.detach().clone()}
            tokens = torch.tensor(loss_BT.numel(), dtype=torch.int)
            return (loss, tokens, report) if with_tokens else (loss, report)

        reports, found = window(loss_func)
        assert [report["loss"].item() for report in reports] == losses
        assert len(set(losses)) == MICROBATCHES
        return found

    assert gradients(True) == gradients(False)


@on_ranks(1)
def test_a_report_without_an_alias_is_the_very_same_object():
    given = []

    def loss_func(loss_BT: Any) -> Any:
        loss = loss_BT.float().mean()
        given.append({"loss": loss.detach().clone(), "tokens": loss_BT.numel()})
        return loss, given[-1]

    reports, _ = window(loss_func)
    assert all(got is gave for got, gave in zip(reports, given, strict=True))


@on_ranks(1)
def test_data_that_is_no_loss_passes_through():
    """A forward-only pass collects it."""

    def collect(loss_BT: Any, non_loss_data: bool = False) -> Any:
        assert non_loss_data
        return loss_BT.detach()

    reports, _ = window(collect, forward_only=True, collect_non_loss_data=True)
    assert [tuple(report.shape) for report in reports] == [(2, 32)] * MICROBATCHES


@pytest.mark.skipif(
    locate("megatron.core.transformer.moe.router_trace") is None,
    reason="this release has no router trace",
)
@on_ranks(1)
def test_each_router_of_either_model_is_traced_once(tmp_path):
    from megatron.core.transformer.moe import router_trace

    a, b = (built(experts=4, with_optimizer=False) for _ in "ab")
    router_trace.init_moe_router_tracer(str(tmp_path), max_steps=10, rank=0, training_mode=True)
    tracer = router_trace.get_moe_router_tracer()
    for model in (a, b, a):
        tracer.register_hooks(model.chunks)
    for model in (a, b):
        assert max(len(module._forward_hooks) for module in model.chunks[0].modules()) == 1
