"""Effects of `finish_grad_sync` and `finalize_model_grads`, window by window."""

from __future__ import annotations

import contextlib
import re

import pytest
from ranks import VIRTUAL, built, on_ranks, same

pytestmark = [pytest.mark.full, pytest.mark.patched]


def build(**options):
    return built(**{"with_optimizer": False, **options})


EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize("distributed_optimizer", [pytest.param(False, marks=EXHAUSTIVE), True])
@pytest.mark.parametrize(
    ("ranks", "counts", "options"),
    [
        pytest.param(2, (2, 2, 3, 1, 4), {}, id="pp1"),
        pytest.param(4, (2, 2, 3, 1, 4), {"pp": 2}, id="pp2", marks=EXHAUSTIVE),
        pytest.param(4, (2, 2, 4, 6, 2), VIRTUAL, id="interleaved"),
    ],
)
@on_ranks("ranks", timeout_s=120)
def test_the_number_of_microbatches_may_change_from_window_to_window(
    counts, options, distributed_optimizer
):
    # One bucket per chunk, so that with and without overlap the shards are the same.
    options = {**options, "ddp_overrides": {"bucket_size": None}}
    plain, overlapped = (
        build(overlap_grad_reduce=on, distributed_optimizer=distributed_optimizer, **options)
        for on in (False, True)
    )
    for window, count in enumerate(counts):
        for model in (plain, overlapped):
            model.forward_backward(count, data_seed=window)
        assert same(plain, overlapped), window


OFF = {"overlap_grad_reduce": False, "distributed_optimizer": False}
REFUSED = "cannot be reduced again: "


@pytest.mark.parametrize(
    ("ranks", "options", "why"),
    [
        (2, OFF, None),
        (2, OFF | {"overlap_grad_reduce": True}, None),
        (1, {}, None),
        (2, {}, "after a reduce-scatter all but the rank's own shard is still local"),
        (
            2,
            OFF | {"config_overrides": {"calculate_per_token_loss": True}},
            "a sum over 2 ranks scaled by 1",
        ),
        (
            2,
            OFF | {"tp": 2, "sequence_parallel": True},
            "layer norms' gradients are already summed over 2 tensor-parallel ranks",
        ),
        (2, OFF | {"ep": 2, "experts": 2}, "a sum over 1 ranks scaled by 0.5"),
    ],
    ids=["all-reduce", "overlap", "one-rank", "reduce-scatter", "per-token", "tp-sp", "experts"],
)
@on_ranks("ranks")
def test_a_second_window_without_zeroing_is_reduced_where_that_is_exact(options, why):
    from megatron_idempotent.patches._case import backward

    model = build(**options)

    def window(seed):
        if "config_overrides" in options:  # the bench's loss function counts no tokens
            backward(model, data_seed=seed)
        else:
            model.forward_backward(2, data_seed=seed, zero_first=False)
        for chunk in model.chunks:
            chunk.finish_grad_sync()

    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    window(0)
    refused = re.escape(f"{REFUSED}{why}")
    with pytest.raises(RuntimeError, match=refused) if why else contextlib.nullcontext():
        window(1)


@on_ranks(2)
def test_zeroing_after_a_refusal_makes_the_next_window_right():
    """It is so in and after the first window."""
    model, fresh = build(), build()
    for _ in range(2):
        model.forward_backward(2, data_seed=0)
        with pytest.raises(RuntimeError, match=REFUSED):
            model.forward_backward(1, data_seed=1, zero_first=False)
        for each in (model, fresh):
            each.forward_backward(3, data_seed=2)
        assert same(model, fresh)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((2, 2), "reduced"),
        ((2, 3), "3 gradients in this window where its bucket group waits for 2, after its bucket"),
        ((2, 1), "1 gradients in this window where its bucket group waits for 2, and its bucket"),
    ],
)
@on_ranks(2)
def test_without_no_sync_a_changed_number_of_microbatches_raises(counts, expected):
    model = build(distributed_optimizer=False)
    model.config.no_sync_func = None
    outcome = "reduced"
    try:
        for seed, count in enumerate(counts):
            model.forward_backward(count, data_seed=seed)
    except (RuntimeError, AssertionError) as error:
        outcome = str(error)
    # Before 0.16 upstream allows one microbatch, and says so.
    assert expected in outcome or outcome == "Cannot set grad twice"


@pytest.mark.parametrize("overlap", [False, True])
@on_ranks(2)
def test_a_second_finish_grad_sync_does_nothing_to_gradients(overlap):
    """Parameters are gathered again."""
    model = build(overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    (chunk,) = model.chunks
    model.forward_backward(2, data_seed=0)
    once = model.gradients()
    for group in chunk.bucket_groups:
        group.param_gather_dispatched = True
    chunk.finish_grad_sync()
    assert not any(group.param_gather_dispatched for group in chunk.bucket_groups)
    assert same(once, model.gradients())


@on_ranks(2)
def test_with_cuda_graphs_a_second_finish_is_never_taken_for_idle():
    """Graphs that are replayed may have written."""
    model = build(overlap_grad_reduce=False)
    model.forward_backward(1, data_seed=0)
    model.chunks[0].config.enable_cuda_graph = True
    with pytest.raises(RuntimeError, match=REFUSED):
        model.chunks[0].finish_grad_sync()


@on_ranks(2)
def test_finish_grad_sync_still_refuses_where_a_rank_has_run_nothing():
    """A window that rank 0 does not take part in; rank 1 does not wait for it."""
    import torch

    model = build()
    (chunk,) = model.chunks
    model.forward_backward(2, data_seed=0)
    chunk.zero_grad_buffer()
    if torch.distributed.get_rank() == 0:
        with pytest.raises(AssertionError, match="Communication"):
            chunk.finish_grad_sync()


@on_ranks(2)
def test_gradients_held_back_behind_a_reduction_are_refused():
    """The interleaved schedule's own no_sync contexts, and then one microbatch too many."""
    model = build(**VIRTUAL, distributed_optimizer=False)
    for seed in range(3):
        model.forward_backward(4, data_seed=seed)
    first, second = model.chunks
    model.config.finalize_model_grads_func = None
    model.forward_backward(4, data_seed=3)
    with first.no_sync(), second.no_sync():
        model.forward_backward(4, data_seed=4, zero_first=False)
    for chunk in model.chunks:
        with pytest.raises(RuntimeError, match="reduction"):
            chunk.finish_grad_sync()
