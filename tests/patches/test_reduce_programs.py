"""Random programs of windows: at every reduction the gradient is right to the bit, or an error."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest

pytestmark = pytest.mark.exhaustive

SEEDS = range(16)
WINDOWS = 8


def run_window(model, draw: dict, *, zero: bool, finalize: bool, held: int) -> None:
    """One window as drawn; an abort raises ValueError on all ranks at once."""
    from megatron.core.distributed import finalize_model_grads

    (chunk,) = model.chunks

    def fail(index, loss):
        if loss is None and index == draw["abort"]:
            raise ValueError("bad sample")

    model.on_microbatch = fail
    model.config.finalize_model_grads_func = finalize_model_grads if finalize else None
    if zero:
        chunk.zero_grad_buffer()
    try:
        with ExitStack() as stack:
            for _ in range(held):
                stack.enter_context(chunk.no_sync())
            model.forward_backward(draw["microbatches"], data_seed=draw["data"], zero_first=False)
    finally:
        model.on_microbatch = None


def draws(seed: int) -> list[dict]:
    rng = random.Random(seed)
    return [
        {
            "microbatches": rng.randint(1, 4),
            "data": rng.randrange(1000),
            "zero": rng.random() < 0.5,
            "held": rng.choice([0, 0, 0, 1, 2]),
            "finalize": rng.random() < 0.6,
            "finishes": rng.choice([0, 0, 0, 1, 2]),
            "abort": rng.randrange(4) if rng.random() < 0.15 else None,
            "keep": rng.random() < 0.5,
            "forward_only": rng.random() < 0.15,
        }
        for _ in range(WINDOWS)
    ]


def right(chunk, reference) -> bool:
    """Whether what this rank reduced has the bits of the reference, parameter by parameter."""
    import torch

    expected = dict(reference.module.named_parameters())
    names = {param: name for name, param in chunk.module.named_parameters()}
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    for bucket in (bucket for group in chunk.bucket_groups for bucket in group.buckets):
        shard = slice(0, bucket.grad_data.numel())
        if chunk.ddp_config.use_distributed_optimizer:
            size = bucket.grad_data.numel() // ranks
            shard = slice(rank * size, (rank + 1) * size)
        for param in bucket.params_list:
            start = (param.main_grad.data_ptr() - bucket.grad_data.data_ptr()) // 4
            mine = slice(max(shard.start - start, 0), max(shard.stop - start, 0))
            wanted = expected[names[param]].main_grad.flatten()[mine]
            if not torch.equal(param.main_grad.flatten()[mine], wanted):
                return False
    return True


def run_programs(overlap: bool, distributed_optimizer: bool) -> dict[str, int]:
    """On a rank: how often a reduction was right, silently wrong, or refused."""
    import torch

    import megatron_idempotent
    from megatron_idempotent.cpu import tiny

    megatron_idempotent.apply(strict=True)
    seen = {"right": 0, "wrong": 0, "refused": 0}
    for seed in SEEDS:
        model = tiny.build(
            overlap_grad_reduce=overlap,
            distributed_optimizer=distributed_optimizer,
            with_optimizer=False,
        )
        # Accumulates by itself, and is reduced here by hand.
        plain = tiny.build(
            overlap_grad_reduce=False, distributed_optimizer=False, with_optimizer=False
        )
        refused, kept = True, []
        for draw in draws(seed):
            zero = draw["zero"] or refused
            refused = False
            try:
                run_window(plain, draw, zero=zero, finalize=False, held=0)
            except ValueError:
                assert draw["abort"] is not None
            reduced = False
            try:
                if draw["forward_only"]:
                    model.forward_backward(1, data_seed=0, forward_only=True)
                try:
                    held = draw["held"] if overlap else 0
                    run_window(model, draw, zero=zero, finalize=draw["finalize"], held=held)
                    reduced = draw["finalize"]
                except ValueError as error:
                    kept = [error] if draw["keep"] else []
                for _ in range(draw["finishes"]):
                    model.chunks[0].finish_grad_sync()
                    reduced = True
            except (RuntimeError, AssertionError):
                seen["refused"] += 1
                refused = True
                continue
            if reduced:
                for buffer in plain.chunks[0].buffers:
                    buffer.grad_data *= 0.5
                    torch.distributed.all_reduce(buffer.grad_data)
                agreed = torch.tensor(right(model.chunks[0], plain.chunks[0]))
                torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN)
                seen["right" if agreed else "wrong"] += 1
                refused = not agreed
        del kept
    return seen


@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_no_program_of_windows_ends_in_silently_wrong_gradients(
    overlap, distributed_optimizer, megatron_ranks
):
    first, second = megatron_ranks(2, run_programs, overlap, distributed_optimizer, timeout_s=180)
    assert first == second
    assert first["wrong"] == 0
    assert first["right"] > 40
    if distributed_optimizer:
        assert first["refused"] > 5
    elif not overlap:
        assert first["refused"] == 0, "an all-reduce that averages may be repeated"
