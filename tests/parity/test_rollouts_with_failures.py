"""Three rollouts, one of them interrupted and gone on with, end as three that nothing disturbed.

Bit-equal in parameters, losses, scheduler, consumed samples and counts. Runs on the releases whose
wheel carries `megatron.training`: 0.17.1, 0.18.2 and 0.19.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from megatron_idempotent.patching.source import locate

OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
MICROBATCHES = 4

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        locate("megatron.training.training") is None,
        reason="this release's wheel does not carry megatron.training",
    ),
]


@dataclass(frozen=True)
class Layout:
    """Layout of a program over ranks."""

    name: str
    ranks: int = 2
    options: tuple[str, ...] = ()
    pp: int = 1
    vpp: int | None = None

    def __str__(self) -> str:
        return self.name


PLAIN = Layout("plain")
OVERLAPPED = Layout("overlap", options=OVERLAP)
STAGES = Layout("stages", pp=2)
INTERLEAVED = Layout("interleaved", options=OVERLAP, pp=2, vpp=2)


class Failure(Exception):
    """A sandbox, a data loader or a logger raises this in the middle of training."""


def once(call: Callable[..., Any], number: int, error: BaseException) -> Callable[..., Any]:
    """`call`, which raises instead of its call `number`, counted from 0."""
    calls = iter(range(1 << 30))

    def maybe(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise error
        return call(*args, **kwargs)

    return maybe


def fail(running: Any, where: str, iteration: int) -> None:
    """Let a program fail once on all ranks: in `iteration`, or right after its step."""
    from megatron.training import training

    error = KeyboardInterrupt() if where == "interrupt" else Failure(where)
    if where == "forward":
        running._forward_step = once(running._forward_step, iteration * MICROBATCHES + 2, error)
    elif where in ("optimizer", "interrupt"):
        running.optimizer.step = once(running.optimizer.step, iteration, error)
    elif where == "step's end":
        training.ft_integration.on_training_step_end = once(
            training.ft_integration.on_training_step_end, iteration, error
        )
    elif where == "logging":
        training.training_log = once(training.training_log, iteration, error)
    elif where == "exit condition":
        running.args.exit_interval = iteration + 1


def microbatches(first: int, size: int, rank: int) -> Iterator[Any]:
    """(tokens [B, T], positions [B, T], mask) from microbatch `first` of this rank on."""
    import torch

    from megatron_idempotent.proof.cpu.program import SEQUENCE, VOCABULARY

    positions_BT = torch.arange(SEQUENCE).expand(size, -1)
    hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE).tril() < 0.5
    for index in range(first, 1 << 30):
        generator = torch.Generator().manual_seed(1000 * rank + index)
        tokens_BT = torch.randint(0, VOCABULARY, (size, SEQUENCE), generator=generator)
        yield tokens_BT, positions_BT, hidden


def three_rollouts(layout: Layout, where: str, iteration: int) -> dict[str, Any]:
    """Runs on a rank: 3 rollouts of 2 iterations; what is left of them, and how often one
    failed."""
    from megatron.core import parallel_state
    from megatron.core.rerun_state_machine import RerunDataIterator

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import program

    megatron_idempotent.apply(strict=True)
    running = program.start(layout.options, pp=layout.pp, vpp=layout.vpp)
    args, rank = running.args, parallel_state.get_data_parallel_rank()
    stride = args.micro_batch_size * parallel_state.get_data_parallel_world_size()
    fail(running, where, iteration)
    failures = 0
    for end in (2, 4, 6):
        while args.iteration < end:
            args.train_iters = args.iteration  # train(n) adds n
            first = args.consumed_train_samples // stride
            running.data = [
                RerunDataIterator(microbatches(first, args.micro_batch_size, rank))
                for _ in running.chunks
            ]
            try:
                running.train(end - args.iteration)
            except (Failure, KeyboardInterrupt, SystemExit):
                failures += 1
                args.exit_interval = None
                del running.losses[args.iteration * MICROBATCHES :]
    return {
        "parameters": running.parameters().numpy().tobytes(),
        "losses": running.losses,
        "iteration": args.iteration,
        "consumed": args.consumed_train_samples,
        "skipped": args.skipped_train_samples,
        "operations": args.num_floating_point_operations_so_far,
        "scheduler": running.scheduler.state_dict(),
        "failures": failures,
    }


# Run once per layout; the fixture is another one in each test.
_undisturbed: dict[Layout, list[dict[str, Any]]] = {}


def undisturbed(layout: Layout, run: Callable[..., Any]) -> list[dict[str, Any]]:
    """The same without a failure."""
    if layout not in _undisturbed:
        _undisturbed[layout] = run(layout.ranks, three_rollouts, layout, "nowhere", 0)
    return _undisturbed[layout]


FAILURES = [
    *((PLAIN, where) for where in ("forward", "step's end", "exit condition", "interrupt")),
    *((OVERLAPPED, where) for where in ("forward", "optimizer", "logging", "exit condition")),
    *((STAGES, where) for where in ("optimizer", "logging")),
    *((INTERLEAVED, where) for where in ("optimizer", "step's end")),
]


# The second rollout's iterations: with overlap, forward pre-hooks are off in 2 and on in 3.
@pytest.mark.parametrize("iteration", [2, 3])
@pytest.mark.parametrize(("layout", "where"), FAILURES, ids=str)
def test_an_interrupted_rollout_goes_on_to_the_bit(layout, where, iteration, megatron_ranks):
    results = megatron_ranks(layout.ranks, three_rollouts, layout, where, iteration)
    expected = undisturbed(layout, megatron_ranks)
    for result, reference in zip(results, expected, strict=True):
        assert result.pop("failures") == 1
        assert result == {name: reference[name] for name in result}
    assert len(set(results[-1]["losses"])) == 6 * MICROBATCHES
