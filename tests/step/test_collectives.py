"""A step in pieces costs what the one-shot step does: collectives, and no copy of a gradient."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from ranks import on_ranks, tiered
from scenario import Bench, one_shot, split_step
from torch.distributed import ProcessGroup

from megatron_idempotent.megatron.ddp import bucket_groups
from megatron_idempotent.megatron.optimizers import count_outdated
from megatron_idempotent.proof.cpu.probes import allocations, peak_bytes, watching_collectives

PIECES = {1: [6], 3: [1, 2, 3]}
STEPS = 2
# Operation, group, and elements and type of each tensor.
Call = tuple[str, str, tuple[tuple[int, str], ...]]


def recorded(run: Any) -> tuple[Counter[Call], Counter[Call]]:
    """Record what reaches the process groups while `run` runs: the model's, and the host's
    agreements.

    Messages between pipeline stages too. Seen by torch's dispatcher, so that it does not matter
    under which name or in which form a collective was called.
    """
    from megatron_idempotent.window import agreement

    seen: list[Call] = []

    def see(name: str, values: list[Any]) -> None:
        group = "".join(
            ProcessGroup.unbox(value).group_name
            for value in values
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in value._type().str()
        )
        tensors = tuple(
            (value.numel(), str(value.dtype)) for value in values if isinstance(value, torch.Tensor)
        )
        seen.append((name, group, tensors))

    with watching_collectives(see):
        run()
    control = {group.group_name: name for (name, _), (_, group) in agreement._control.items()}
    models = Counter(call for call in seen if call[1] not in control)
    hosts = Counter((op, control[group], sizes) for op, group, sizes in seen if group in control)
    return models, hosts


def reductions(calls: Counter[Call]) -> Counter[tuple[int, ...]]:
    """Elements of each bucket in each reduction of a bucket group."""
    found: Counter[tuple[int, ...]] = Counter()
    for (op, _, tensors), number in calls.items():
        sizes = [size for size, _ in tensors]
        if op == "allreduce_coalesced_":
            found[tuple(sizes)] += number
        elif op == "reduce_scatter_tensor_coalesced_":
            found[tuple(sizes[len(sizes) // 2 :])] += number  # outputs come first
    return found


def compared(options: dict[str, Any]) -> list[Any]:
    """Runs on a rank; returns for each way to cut the step what differs, and the host's
    agreements."""

    def run(pieces: list[int] | None, last: bool) -> tuple[list[Any], Any]:
        bench = Bench(**options)
        made = bench.model, bench.scheduler, bench.loss
        buckets = Counter(
            tuple(bucket.grad_data.numel() for bucket in group.buckets)
            for chunk in bench.model.chunks
            for group in bucket_groups(chunk)
        )
        models, hosts = [], Counter()
        for seed in range(STEPS):
            batch = bench.batch(6, seed=seed)
            if pieces is None:
                calls, hosts = recorded(lambda b=batch: one_shot(*made, b))
            else:
                calls, hosts = recorded(
                    lambda b=batch: split_step(bench.step, bench.loss, b, pieces, last=last)
                )
            assert reductions(calls) == buckets, (seed, pieces, last)
            models.append(calls)
        return models, hosts

    want, none = run(None, False)
    assert len(want[1]) > 1
    assert not none
    found = []
    for number, pieces in PIECES.items():
        for last in (False, True):
            calls, hosts = run(pieces, last)
            differing = [(a - b, b - a) for a, b in zip(calls, want, strict=True) if a != b]
            found.append((number, last, differing, hosts))
    return found


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp2, all-reduce": (2, {"distributed_optimizer": False}),
    "dp2, no overlap": (2, {"overlap_grad_reduce": False}),
    "dp2, gathers": (2, {"overlap_param_gather": True}),
    # One bucket: with more, 0.12 maps the shared weight to two of them, and asserts.
    "pp2": (2, {"pp": 2, "tied": True, "ddp_overrides": {"bucket_size": 1 << 30}}),
    "tp2, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "ep2": (2, {"experts": 4, "ep": 2, "overlap_param_gather": True}),
}


def agreements(layout: str, number: int, last: bool) -> Counter[tuple[str, str, int]]:
    """Operation, who takes part, and bytes of each rank: what a step in pieces may cost besides."""
    gather, flag = "allgather_", "allreduce_"
    whole = Counter({(gather, "all", 4096): 2 + last})
    # Where ranks meet inside of the model they agree before each call on what it is, and after it
    # on whether it went well.
    if layout in ("pp2", "tp2, sequence parallel"):
        return whole + Counter({(gather, "replica", 4096): number, (flag, "replica", 4): number})
    if layout == "ep2":
        # The last call's agreement says that it is the last.
        return Counter({(gather, "all", 4096): 2 + number, (flag, "all", 4): number})
    return whole


ALWAYS = ("dp2, gathers", "pp2")


@pytest.mark.parametrize("layout", tiered(LAYOUTS, ALWAYS, "full"))
def test_collectives_are_those_of_the_one_shot_step(megatron_ranks, layout):
    ranks, options = LAYOUTS[layout]
    for found in megatron_ranks(ranks, compared, options, timeout_s=180):
        for number, last, differing, hosts in found:
            assert not differing, (number, last, differing)
            cost: Counter[tuple[str, str, int]] = Counter()
            for (op, who, tensors), count in hosts.items():
                size, kind = tensors[-1]  # the input of this rank
                cost[op, who, size * {"torch.uint8": 1, "torch.int32": 4}[kind]] += count
            assert cost == agreements(layout, number, last), (number, last)


CUTS = (([4], False), ([1] * 4, True))
# Bytes. Above it are activations of the tiny model and buckets of its gradients; below it are the
# host's messages, 4 KiB for each rank, and the states of random generators, 5 KiB each.
SMALL = 10_000
# Five such states, which an open step could go back to, each microbatch's metrics and counts, and
# the messages of three agreements between two ranks, whose release is seen or not.
HELD = 30_000 + 3 * 2 * 4096


def _large(sizes: list[int]) -> Counter[int]:
    return Counter(size for size in sizes if size > SMALL)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap_param_gather": True},
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"distributed_optimizer": False}, marks=pytest.mark.full),
        pytest.param({"dtype": "bf16"}, marks=pytest.mark.full),
        pytest.param(
            {"config_overrides": {"calculate_per_token_loss": False}}, marks=pytest.mark.full
        ),
    ],
    ids=str,
)
@on_ranks(2, timeout_s=120)
def test_nothing_large_is_allocated_that_the_one_shot_step_does_not(
    options: dict[str, Any],
) -> None:

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
    # A step in 16 bits compares main parameters with the model's, a parameter at a time.
    compared = functools.partial(count_outdated, bench.model.optimizer, "cpu")
    large += _large(allocations(compared))
    found: dict[str, Any] = {}
    for pieces, last in CUTS:
        split = functools.partial(split_step, step, loss, batch, pieces, last=last)
        more = _large(allocations(split)) - large
        found[f"{pieces} {last}"] = dict(more), peak_bytes(split) - most
    held = allocations(lambda: step.microbatch(bench.begin(), batch))
    found["while it is open"] = {}, sum(held)
    step.abort()
    assert not {way: more for way, (more, _) in found.items() if more}
    most_held = HELD + peak_bytes(compared)
    assert max(held for _, held in found.values()) < most_held, (found, most_held)
