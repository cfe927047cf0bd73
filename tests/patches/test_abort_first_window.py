"""Bucket groups learn from their first window, also where that one was not a whole one."""

from __future__ import annotations

from typing import Any

import pytest
from abort_sites import Interrupted
from ranks import built, loss_of, on_ranks, same

from megatron_idempotent.proof.prove import affected

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        "first-window-aborted" not in affected(), reason="before 0.16 nothing is learned"
    ),
]


def _build(applied: bool) -> Any:
    return built(applied=applied, layers_per_stage=1, wire=False)


def _window(model: Any, *seeds: int, interrupt: bool = False) -> Any:
    """Gradients of a window in which each comes once per seed, past the schedules."""
    (chunk,) = model.chunks
    chunk.zero_grad_buffer()
    for seed in seeds:
        loss_of(chunk, seed).backward()
        if interrupt:
            raise Interrupted
    chunk.finish_grad_sync()
    return model.gradients()


def _has_learned(model: Any) -> bool:
    return not any(group.is_first_batch for group in model.chunks[0].bucket_groups)


@pytest.mark.parametrize("applied", [True, False])
@on_ranks(2)
def test_counts_of_an_unfinished_first_window_are_learned_on_stock_only(applied):
    """Abort when each gradient has come once of twice; stock reduces too early, silently."""
    model, other = _build(applied), _build(applied)
    expected = _window(other, 0, 1)
    with pytest.raises(Interrupted):
        _window(model, 0, 1, interrupt=True)
    right = [same(_window(model, 0, 1), expected) for _ in range(3)]
    assert right == [applied] * 3
    assert _has_learned(model) or not applied, "reductions have to overlap again"


def _layer_left_out(model: Any) -> Any:
    """Let the only layer pass its input on, as a vision tower on a batch of text is passed by."""
    layer = model.chunks[0].module.decoder.layers[0]
    layer.forward = lambda hidden_states, *args, **kwargs: (hidden_states, None)
    return layer


@pytest.mark.parametrize("applied", [True, False])
@on_ranks(2)
def test_a_text_only_first_batch_leaves_later_windows_exact(applied):
    """A first window that leaves parameters unused, after which stock cannot zero."""
    model, other, text_only = (_build(applied) for _ in range(3))
    expected = _window(other, 0)
    _layer_left_out(text_only)
    expected_of_text = _window(text_only, 0)
    layer = _layer_left_out(model)
    assert same(_window(model, 0), expected_of_text)
    if not applied:
        with pytest.raises(AssertionError):
            _window(model, 0)
        return
    assert same(_window(model, 0), expected_of_text)
    del layer.forward
    assert [same(_window(model, 0), expected) for _ in range(3)] == [True] * 3
    assert _has_learned(model)


def reductions_started_early(*, applied: bool) -> list[int]:
    """Runs on a rank: reductions started in the backward passes of three ordinary windows."""
    model = _build(applied)
    (chunk,) = model.chunks
    started = []
    for _ in range(3):
        chunk.zero_grad_buffer()
        loss_of(chunk, 0).backward()
        started.append(sum(g.grad_reduce_handle is not None for g in chunk.bucket_groups))
        chunk.finish_grad_sync()
    return started


def test_ordinary_windows_overlap_as_on_stock(megatron_ranks):
    stock = megatron_ranks(2, reductions_started_early, applied=False)
    assert megatron_ranks(2, reductions_started_early, applied=True) == stock
    assert all(first == 0 and second == third > 1 for first, second, third in stock)
