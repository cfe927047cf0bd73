"""Numerics on real Megatron: what must be equal is compared, not only run."""

import functools

import pytest

from megatron_idempotent.proof.cpu import tiny

pytestmark = pytest.mark.full


def train(steps=2, num_microbatches=4, **layout):
    """(losses of all steps, final parameters [P]), without clipping.

    Where ranks share the gradients they share the sums of their norm too, and how they are cut
    decides its last bit. Adam goes element by element, and every cut is at a multiple of 64, so
    that no element changes between the vectors of a CPU and the rest after them.
    """
    bench = tiny.build(**layout, optimizer_overrides={"clip_grad": 0.0})
    losses = []
    for seed in range(steps):
        losses += bench.forward_backward(num_microbatches, data_seed=seed)
        success, _, _ = bench.step()
        assert success
    if bench.chunks[0].ddp_config.overlap_param_gather:
        for chunk in bench.chunks:
            chunk.start_param_sync(force_sync=True)
    return losses, bench.parameters()


@pytest.fixture(scope="module")
def trained(megatron_rank_pool):
    """`trained(**layout)` gives what two ranks return of `train`; it runs each layout once."""
    return functools.cache(functools.partial(megatron_rank_pool.run, 2, train, timeout_s=60.0))


def overflow():
    start = 2.0**16
    bench = tiny.build(
        dtype="fp16", optimizer_overrides={"initial_loss_scale": start, "hysteresis": 1}
    )
    before = bench.parameters()
    bench.on_microbatch = lambda index, loss: None if loss is None else loss * 1e30
    bench.forward_backward(1, data_seed=0)
    skipped, _, _ = bench.step()
    unchanged = bool((bench.parameters() == before).all())
    halved = float(bench.optimizer.get_loss_scale())
    bench.on_microbatch = None
    bench.forward_backward(1, data_seed=0)
    taken, _, _ = bench.step()
    moved = bool((bench.parameters() != before).any())
    return skipped, unchanged, halved / start, taken, moved


def gradients(**config_overrides):
    bench = tiny.build(config_overrides=config_overrides)
    losses = bench.forward_backward(2, data_seed=3)
    return losses, bench.gradients()


def dropout_masks():
    """Masks drawn inside and outside of the tracker's region, per tensor-parallel rank."""
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tiny.build(tp=2, with_optimizer=False)
    outside = torch.rand(8, device="cuda")
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(8, device="cuda")
    return outside, inside, torch.rand(8, device="cuda")


def same(a, b):
    return a[0] == b[0] and bool((a[1] == b[1]).all())


def test_the_distributed_optimizer_makes_the_same_step(trained):
    with_it = trained()
    without = trained(distributed_optimizer=False)
    assert all(same(a, b) for a, b in zip(with_it, without, strict=True))


@pytest.mark.parametrize("pipeline", [{}, {"pp": 2, "vpp": 2, "layers_per_stage": 1}])
def test_overlap_changes_no_bit(trained, pipeline):
    plain = trained(overlap_grad_reduce=False, **pipeline)
    for overlap in (
        {},
        {"overlap_param_gather": True},
        {"overlap_param_gather": True, "align": True},
    ):
        overlapped = trained(**overlap, **pipeline)
        assert all(same(a, b) for a, b in zip(plain, overlapped, strict=True)), overlap


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_follows_full_precision(trained, dtype):
    scale = {"loss_scale": 1024.0} if dtype == "fp16" else {}
    half = trained(dtype=dtype, **scale)
    full = trained()
    assert half[0][0] == pytest.approx(full[0][0], abs=0.01)
    assert half[0][0] != full[0][0]


def test_an_fp16_overflow_skips_the_step_and_halves_the_scale(megatron_ranks):
    assert megatron_ranks(2, overflow) == [(False, True, 0.5, True, True)] * 2


def test_recomputation_gives_the_same_gradients_and_replays_dropout(megatron_ranks):
    for dropout in (0.0, 0.3):
        keep = {"hidden_dropout": dropout, "attention_dropout": dropout}
        stored = megatron_ranks(2, gradients, **keep)
        recomputed = megatron_ranks(
            2,
            gradients,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
            **keep,
        )
        assert all(same(a, b) for a, b in zip(stored, recomputed, strict=True))


def test_dropout_changes_the_loss(megatron_ranks):
    [without, with_it] = (
        megatron_ranks(1, gradients, hidden_dropout=rate)[0][0] for rate in (0.0, 0.3)
    )
    assert without != with_it


def test_tensor_parallel_ranks_differ_only_inside_the_rng_trackers_region(megatron_ranks):
    first, second = megatron_ranks(2, dropout_masks)
    assert bool((first[0] == second[0]).all())
    assert not bool((first[1] == second[1]).any())
    assert bool((first[2] == second[2]).all())
