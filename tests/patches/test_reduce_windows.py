"""Effects of `finish_grad_sync` and `finalize_model_grads`, window by window."""

from __future__ import annotations

import pytest


def build(**options):
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply(strict=True)
    return tiny.build(**{"with_optimizer": False, **options})


def differ_between_overlap_on_and_off(counts: tuple[int, ...], options: dict) -> list[int]:
    """Runs on a rank: the windows whose gradients change with overlap_grad_reduce; none are
    expected."""
    import torch

    models = [build(overlap_grad_reduce=overlap, **options) for overlap in (False, True)]
    different = []
    for window, count in enumerate(counts):
        for model in models:
            model.forward_backward(count, data_seed=window)
        plain, overlapped = (model.gradients() for model in models)
        if not torch.equal(plain, overlapped):
            different.append(window)
    return different


@pytest.mark.parametrize(
    "distributed_optimizer", [pytest.param(False, marks=pytest.mark.exhaustive), True]
)
@pytest.mark.parametrize(
    ("ranks", "counts", "options"),
    [
        pytest.param(2, (2, 2, 3, 1, 4), {}, id="pp1"),
        pytest.param(4, (2, 2, 3, 1, 4), {"pp": 2}, id="pp2", marks=pytest.mark.exhaustive),
        pytest.param(
            4,
            (2, 2, 4, 6, 2),
            {"pp": 2, "vpp": 2, "layers_per_stage": 1},
            id="interleaved",
        ),
    ],
)
def test_the_number_of_microbatches_may_change_from_window_to_window(
    ranks, counts, options, distributed_optimizer, megatron_ranks
):
    # One bucket per chunk, so that with and without overlap the shards are the same.
    options = options | {
        "distributed_optimizer": distributed_optimizer,
        "ddp_overrides": {"bucket_size": None},
    }
    seen = megatron_ranks(ranks, differ_between_overlap_on_and_off, counts, options, timeout_s=120)
    assert seen == [[]] * ranks


def second_window(options: dict, finalize: bool) -> str:
    """Runs on a rank: what a second window without zeroing ends in."""
    model = build(**options)
    model.forward_backward(2, data_seed=0)
    if not finalize:
        model.config.finalize_model_grads_func = None
    try:
        model.forward_backward(2, data_seed=1, zero_first=False)
        for chunk in model.chunks:
            chunk.finish_grad_sync()
    except RuntimeError as error:
        return str(error)
    return "reduced"


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
            "layer norms' gradients are summed over 2 tensor-parallel ranks already",
        ),
        (2, OFF | {"ep": 2, "experts": 2}, "a sum over 1 ranks scaled by 0.5"),
    ],
    ids=["all-reduce", "overlap", "one-rank", "reduce-scatter", "per-token", "tp-sp", "experts"],
)
def test_a_second_window_without_zeroing_is_reduced_where_that_is_exact(
    ranks, options, why, megatron_ranks
):
    if "config_overrides" in options:  # the bench's loss function counts no tokens
        outcomes = megatron_ranks(ranks, second_finish_of_a_sum, options)
    else:
        outcomes = megatron_ranks(ranks, second_window, options, True)
    for outcome in outcomes:
        assert (REFUSED + why in outcome) if why else outcome == "reduced"


def second_finish_of_a_sum(options: dict) -> str:
    """Runs on a rank: two backward passes, each reduced, where the reduction is a plain sum."""
    from megatron_idempotent.patches._scenarios import backward

    model = build(**options)
    (chunk,) = model.chunks
    chunk.zero_grad_buffer()
    backward(model, data_seed=0)
    chunk.finish_grad_sync()
    backward(model, data_seed=1)
    try:
        chunk.finish_grad_sync()
    except RuntimeError as error:
        return str(error)
    return "reduced"


def after_a_refusal() -> tuple[bool, bool]:
    """Runs on a rank: whether the windows after a refused one are right, in and after the first."""
    import torch

    model, fresh = build(), build()
    same = []
    for _ in range(2):
        model.forward_backward(2, data_seed=0)
        with pytest.raises(RuntimeError, match=REFUSED):
            model.forward_backward(1, data_seed=1, zero_first=False)
        model.forward_backward(3, data_seed=2)
        fresh.forward_backward(3, data_seed=2)
        same.append(torch.equal(model.gradients(), fresh.gradients()))
    return same[0], same[1]


def test_zeroing_after_a_refusal_makes_the_next_window_right(megatron_ranks):
    assert megatron_ranks(2, after_a_refusal) == [(True, True)] * 2


def unwired(counts: tuple[int, ...]) -> str:
    """Runs on a rank: windows of a program that does not set no_sync_func."""
    model = build(distributed_optimizer=False)
    model.config.no_sync_func = None
    try:
        for seed, count in enumerate(counts):
            model.forward_backward(count, data_seed=seed)
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return "reduced"


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((2, 2), "reduced"),
        ((2, 3), "3 gradients in this window where its bucket group waits for 2, after its bucket"),
        ((2, 1), "1 gradients in this window where its bucket group waits for 2, and its bucket"),
    ],
)
def test_without_no_sync_a_changed_number_of_microbatches_raises(counts, expected, megatron_ranks):
    for outcome in megatron_ranks(2, unwired, counts):
        # Before 0.16 upstream allows one microbatch, and says so.
        assert expected in outcome or outcome == "Cannot set grad twice"


def finishes(overlap: bool) -> tuple[bool, bool]:
    """Runs on a rank: a second finish_grad_sync changes nothing, and parameters are gathered
    again."""
    import torch

    model = build(overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    (chunk,) = model.chunks
    model.forward_backward(2, data_seed=0)
    once = model.gradients()
    for group in chunk.bucket_groups:
        group.param_gather_dispatched = True
    chunk.finish_grad_sync()
    stale = any(group.param_gather_dispatched for group in chunk.bucket_groups)
    return torch.equal(once, model.gradients()), stale


@pytest.mark.parametrize("overlap", [False, True])
def test_a_second_finish_grad_sync_does_nothing_to_gradients(overlap, megatron_ranks):
    assert megatron_ranks(2, finishes, overlap) == [(True, False)] * 2


def finish_where_graphs_may_have_written() -> None:
    """Runs on a rank: a second finish_grad_sync in a program that replays CUDA graphs."""
    model = build(overlap_grad_reduce=False)
    model.forward_backward(1, data_seed=0)
    model.chunks[0].config.enable_cuda_graph = True
    with pytest.raises(RuntimeError, match=REFUSED):
        model.chunks[0].finish_grad_sync()


def test_with_cuda_graphs_a_second_finish_is_never_taken_for_idle(megatron_ranks):
    megatron_ranks(2, finish_where_graphs_may_have_written)


def held_back(overlap: bool) -> bytes:
    """Runs on a rank: the gradients of a window all of which is inside of no_sync."""
    from megatron_idempotent.patches._scenarios import backward

    options = {"distributed_optimizer": False, "ddp_overrides": {"bucket_size": None}}
    model = build(overlap_grad_reduce=overlap, **options)
    (chunk,) = model.chunks
    model.forward_backward(2, data_seed=0)
    chunk.zero_grad_buffer()
    with chunk.no_sync():
        backward(model, data_seed=1)
    chunk.finish_grad_sync()
    return model.gradients().numpy().tobytes()


def test_finish_grad_sync_reduces_what_no_sync_held_back(megatron_ranks):
    held, plain = (megatron_ranks(2, held_back, overlap) for overlap in (True, False))
    assert held == plain
    assert held[0] == held[1]


def skipped() -> str:
    """Runs on a rank: a window that rank 0 does not take part in; rank 1 does not wait for it."""
    import torch

    model = build()
    (chunk,) = model.chunks
    model.forward_backward(2, data_seed=0)
    chunk.zero_grad_buffer()
    if torch.distributed.get_rank() == 1:
        return "-"
    with pytest.raises(AssertionError, match="Communication call has not been issued"):
        chunk.finish_grad_sync()
    return "refused"


def test_finish_grad_sync_still_refuses_where_a_rank_has_run_nothing(megatron_ranks):
    assert megatron_ranks(2, skipped) == ["refused", "-"]


def late_in_an_interleaved_pipeline() -> str:
    """Runs on a rank: the schedule's own no_sync contexts, and then one microbatch too many."""
    model = build(pp=2, vpp=2, layers_per_stage=1, distributed_optimizer=False)
    for seed in range(3):
        model.forward_backward(4, data_seed=seed)
    first, second = model.chunks
    model.config.finalize_model_grads_func = None
    model.forward_backward(4, data_seed=3)
    with first.no_sync(), second.no_sync():
        model.forward_backward(4, data_seed=4, zero_first=False)
    for chunk in model.chunks:
        with pytest.raises(RuntimeError, match="came after the reduction of its bucket"):
            chunk.finish_grad_sync()
    return "refused"


def test_gradients_held_back_behind_a_reduction_are_refused(megatron_ranks):
    assert megatron_ranks(2, late_in_an_interleaved_pipeline) == ["refused"] * 2
