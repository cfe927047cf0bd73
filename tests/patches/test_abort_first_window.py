"""Bucket groups learn from their first window, also where that one was not a whole one."""

from __future__ import annotations

from typing import Any

import pytest
from abort_sites import Interrupted

from megatron_idempotent.proof.cpu import RankError
from megatron_idempotent.proof.prove import affected

pytestmark = pytest.mark.skipif(
    "first-window-aborted" not in affected(), reason="before 0.16 nothing is learned"
)


def _build(applied: bool) -> tuple[Any, Any]:
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    if applied:
        megatron_idempotent.apply()
    models = [tiny.build(layers_per_stage=1, wire=False) for _ in range(2)]
    return models[0], models[1]


def _loss(model: Any, seed: int) -> Any:
    import torch

    from megatron_idempotent.proof.cpu.tiny import BATCH, SEQUENCE, microbatches

    tokens_BT = next(microbatches(seed))
    positions_BT = torch.arange(SEQUENCE).expand(BATCH, -1)
    hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE).tril() < 0.5
    return model.chunks[0](tokens_BT, positions_BT, hidden, labels=tokens_BT).float().mean()


def _twice(model: Any, *, interrupt: bool = False) -> Any:
    """A window in which each gradient comes twice, as with weights used in two backward passes."""
    (chunk,) = model.chunks
    chunk.zero_grad_buffer()
    for seed in (0, 1):
        _loss(model, seed).backward()
        if interrupt:
            raise Interrupted
    chunk.finish_grad_sync()
    return model.gradients()


def complete_but_too_small(*, applied: bool) -> tuple[list[bool], bool]:
    """Runs on a rank: abort when each gradient has come once of twice; are the next windows right?

    And whether the bucket groups have learned by then when to reduce.
    """
    import torch

    model, other = _build(applied)
    expected = _twice(other)
    with pytest.raises(Interrupted):
        _twice(model, interrupt=True)
    right = [torch.equal(_twice(model), expected) for _ in range(3)]
    return right, not any(group.is_first_batch for group in model.chunks[0].bucket_groups)


def test_counts_of_an_unfinished_first_window_are_not_learned(megatron_ranks):
    for right, learned in megatron_ranks(2, complete_but_too_small, applied=True):
        assert right == [True, True, True]
        assert learned, "reductions have to overlap again"


def test_stock_megatron_learns_them_and_reduces_too_early_without_an_error(megatron_ranks):
    for right, _ in megatron_ranks(2, complete_but_too_small, applied=False):
        assert right == [False, False, False]


def _layer_left_out(model: Any) -> Any:
    """Let the only layer pass its input on, as a vision tower on a batch of text is passed by."""
    layer = model.chunks[0].module.decoder.layers[0]
    layer.forward = lambda hidden_states, *args, **kwargs: (hidden_states, None)
    return layer


def text_only_first(*, applied: bool) -> tuple[list[bool], bool]:
    """Runs on a rank: a first window that leaves parameters unused, then whole ones."""
    import torch

    model, other = _build(applied)

    def window(of: Any) -> Any:
        of.chunks[0].zero_grad_buffer()
        _loss(of, 0).backward()
        of.chunks[0].finish_grad_sync()
        return of.gradients()

    expected = window(other)
    expected_of_text = window(_without_the_layer())
    layer = _layer_left_out(model)
    right = [torch.equal(window(model), expected_of_text) for _ in range(2)]
    del layer.forward
    right += [torch.equal(window(model), expected) for _ in range(3)]
    return right, not any(group.is_first_batch for group in model.chunks[0].bucket_groups)


def _without_the_layer() -> Any:
    """The same weights and buckets, of which only the very first window is used."""
    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(layers_per_stage=1, wire=False)
    _layer_left_out(model)
    return model


def test_a_text_only_first_batch_leaves_later_windows_exact(megatron_ranks):
    for right, learned in megatron_ranks(2, text_only_first, applied=True):
        assert right == [True] * 5
        assert learned


def test_stock_megatron_cannot_zero_after_a_text_only_first_batch(megatron_ranks):
    with pytest.raises(RankError, match="AssertionError"):
        megatron_ranks(2, text_only_first, applied=False)


def reductions_started_early(*, applied: bool) -> list[int]:
    """Runs on a rank: reductions started in the backward passes of three ordinary windows."""
    model, _ = _build(applied)
    (chunk,) = model.chunks
    started = []
    for _ in range(3):
        chunk.zero_grad_buffer()
        _loss(model, 0).backward()
        started.append(sum(g.grad_reduce_handle is not None for g in chunk.bucket_groups))
        chunk.finish_grad_sync()
    return started


def test_ordinary_windows_overlap_as_on_stock(megatron_ranks):
    stock = megatron_ranks(2, reductions_started_early, applied=False)
    assert megatron_ranks(2, reductions_started_early, applied=True) == stock
    assert all(first == 0 and second == third > 1 for first, second, third in stock)
