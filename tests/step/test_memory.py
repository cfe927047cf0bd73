"""A step in pieces holds no more memory than the one-shot step: no copy of any gradient."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

PIECES = {1: [4], 4: [1] * 4}
# Bytes. Above it are activations of the tiny model and buckets of its gradients; below it are the
# host's messages, 4 KiB for each rank, and the states of random generators, 5 KiB each.
SMALL = 10_000
# Five such states, which an open step could go back to, each microbatch's metrics and counts, and
# the messages of three agreements between two ranks, whose release is seen or not.
HELD = 30_000 + 3 * 2 * 4096


def compared(options: dict[str, Any]) -> dict[str, Any]:
    """Runs on a rank: what each way to cut a step allocates beyond the one-shot step."""
    from scenario import Bench, one_shot, split_step

    from megatron_idempotent.megatron.ddp import bucket_groups
    from megatron_idempotent.proof.cpu.probes import allocations, peak_bytes

    # Clipped in every step, or none, so that all allocate the same; the schedule asks for min_lr
    # once it has warmed up.
    bench = Bench(optimizer_overrides={"clip_grad": 1e-3, "min_lr": 1e-3}, **options)
    model, step, loss = bench.model, bench.step, bench.loss
    buckets = [
        bucket.grad_data.nbytes
        for chunk in model.chunks
        for group in bucket_groups(chunk)
        for bucket in group.buckets
    ]
    assert min(buckets) > SMALL
    # Every token valid: up to 0.14 upstream divides a microbatch that has none by 0.
    batch = bench.batch(4, full=True)

    def plain() -> None:
        one_shot(model, bench.scheduler, loss, batch)

    split_step(step, loss, batch, [4])
    plain()  # twice, for the optimizer's state and the order of the reductions
    large, most = _large(allocations(plain)), peak_bytes(plain)
    assert sum(large.values()) > len(buckets)
    found: dict[str, Any] = {}
    for number, pieces in PIECES.items():
        for last in (False, True):

            def split(pieces: list[int] = pieces, last: bool = last) -> None:
                split_step(step, loss, batch, pieces, last=last)

            more = _large(allocations(split)) - large
            found[f"{number} {last}"] = dict(more), peak_bytes(split) - most
    held = allocations(lambda: step.microbatch(bench.begin(), batch))
    found["while it is open"] = {}, sum(held)
    step.abort()
    return found


def _large(sizes: list[int]) -> Counter[int]:
    return Counter(size for size in sizes if size > SMALL)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap_param_gather": True},
        pytest.param({}, marks=pytest.mark.matrix),
        pytest.param({"distributed_optimizer": False}, marks=pytest.mark.matrix),
        pytest.param({"dtype": "bf16"}, marks=pytest.mark.matrix),
        pytest.param(
            {"config_overrides": {"calculate_per_token_loss": False}}, marks=pytest.mark.matrix
        ),
    ],
    ids=str,
)
def test_nothing_large_is_allocated_that_the_one_shot_step_does_not(megatron_ranks, options):
    for found in megatron_ranks(2, compared, options, timeout_s=120):
        assert not {way: more for way, (more, _) in found.items() if more}
        assert max(held for _, held in found.values()) < HELD, found
