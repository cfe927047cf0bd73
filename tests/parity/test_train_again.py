"""k calls of stock `train(n)` under `apply()` are bit-equal to one call of `train(k * n)`.

Also where only adapters are trained.

Runs on the releases whose wheel carries `megatron.training`: 0.17.1, 0.18.2 and 0.19.2.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import tiered

import megatron_idempotent
from megatron_idempotent.patching.source import locate
from megatron_idempotent.proof.cpu import RankError, program

OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
NO_SYNC = r"config\.no_sync_func must be None"
TIMER = "timer has already been started"

pytestmark = pytest.mark.skipif(
    locate("megatron.training.training") is None,
    reason="this release's wheel does not carry megatron.training",
)


@dataclass(frozen=True)
class Layout:
    """Layout of a program over ranks."""

    ranks: int
    options: tuple[str, ...] = ()
    pp: int = 1
    vpp: int | None = None
    shared_config: bool = False

    def __str__(self) -> str:
        stages = f"pp{self.pp}" + (f"-vpp{self.vpp}" if self.vpp else "")
        shared = "-shared" if self.shared_config else ""
        fsdp = "-fsdp" + self.options[5] if "--use-megatron-fsdp" in self.options else ""
        overlap = "on" if set(OVERLAP) <= set(self.options) else "off"
        return f"{stages}-dp{self.ranks // self.pp}{shared}{fsdp}-{overlap}"


# With PP=2 and overlap, four ranks, so that there is a data-parallel group to reduce over.
LAYOUTS = [
    Layout(ranks=2),
    Layout(ranks=2, options=OVERLAP),
    Layout(ranks=2, pp=2),
    Layout(ranks=4, options=OVERLAP, pp=2),
    Layout(ranks=2, options=OVERLAP, pp=2, vpp=2, shared_config=True),
]
MEGATRON_FSDP = (
    *("--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor", "--no-gradient-reduce-div-fusion"),
    "--data-parallel-sharding-strategy",
)
#: One has what all others have, and all run on every release. Two ranks with overlap are in the
#: test with more between the calls.
SOME = tiered(LAYOUTS, LAYOUTS[3:4], "full")


def train(
    layout: Layout, calls: tuple[int, ...], *, applied: bool, adapted: dict[str, Any] | None = None
) -> tuple[list[float], bytes, int]:
    """Runs on a rank: losses seen on the last stage, the parameters' bytes, `args.iteration`.

    `adapted` are arguments of tests/step/lora.py, whose adapters alone are trained.
    """
    more = {}
    if adapted is not None:
        sys.path.insert(0, str(Path(__file__).parents[1] / "step"))
        from lora import Lora

        more["before_ddp"] = Lora(**adapted)
    if applied:
        megatron_idempotent.apply(strict=True)
    running = program.start(
        layout.options, pp=layout.pp, vpp=layout.vpp, shared_config=layout.shared_config, **more
    )
    for iterations in calls:
        running.train(iterations)
    if adapted is not None:
        trained = torch.tensor([sum(len(chunk.params_with_grad) for chunk in running.chunks)])
        torch.distributed.all_reduce(trained)
        assert trained, "some stages train nothing, but not all"
    return running.losses, running.parameters().numpy().tobytes(), running.args.iteration


def train_and_use(layout: Layout, folder: str) -> tuple[list[float], bytes, int]:
    """Runs on a rank: as `train`, three calls of two, each followed by what RL does between them.

    A forward in eval mode without gradients, as for sampling and log-probs, and a checkpoint.
    """
    import queue

    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training.checkpointing import save_checkpoint

    megatron_idempotent.apply(strict=True)
    # Or upstream starts a process for it, which imports Megatron: some ten seconds.
    filesystem_async._results_queue = queue.Queue()
    running = program.start(layout.options)
    positions_BT = torch.arange(program.SEQUENCE, device="cuda")[None]
    hidden = torch.ones(1, 1, program.SEQUENCE, program.SEQUENCE, device="cuda").tril() < 0.5
    (chunk,) = running.chunks
    for _ in range(3):
        running.train(2)
        chunk.eval()
        with torch.no_grad():
            chunk.module(positions_BT, positions_BT, hidden)
        chunk.train()
        running.args.save = folder
        save_checkpoint(
            running.args.iteration, running.chunks, running.optimizer, running.scheduler, 0
        )
        running.args.save = None
    return running.losses, running.parameters().numpy().tobytes(), running.args.iteration


def train_apply_revert(layout: Layout) -> str:
    """Runs on a rank: two calls that work, then what a third one says after `revert()`."""
    megatron_idempotent.apply(strict=True)
    running = program.start(layout.options)
    running.train(1)
    running.train(1)
    megatron_idempotent.revert()
    running.train(1)
    return "the third call worked"


@pytest.fixture(scope="module")
def six_at_once(megatron_rank_pool):
    """Return a function of a layout: one call of six iterations, which is run once."""
    return functools.cache(
        lambda layout: megatron_rank_pool.run(layout.ranks, train, layout, (6,), applied=True)
    )


@pytest.mark.parametrize(
    "layout",
    [
        *SOME,
        *(
            pytest.param(Layout(ranks=2, options=(*MEGATRON_FSDP, *options)), marks=marks)
            for options, marks in (
                (("no_shard", *OVERLAP), pytest.mark.exhaustive),
                (("optim", *OVERLAP), pytest.mark.exhaustive),
                (("optim_grads_params",), pytest.mark.exhaustive),
                (("optim_grads_params", *OVERLAP), ()),
            )
        ),
    ],
    ids=str,
)
def test_three_calls_of_two_iterations_equal_one_call_of_six(layout, six_at_once, megatron_ranks):
    thrice = megatron_ranks(layout.ranks, train, layout, (2, 2, 2), applied=True)
    assert thrice == six_at_once(layout)
    assert all(iteration == 6 for _, _, iteration in thrice)
    last_stage_losses = thrice[-1][0]
    assert len(set(last_stage_losses)) > 6, "the losses must change from window to window"


@pytest.mark.parametrize(
    "layout", [pytest.param(LAYOUTS[0], marks=pytest.mark.full), LAYOUTS[1]], ids=str
)
def test_forwards_and_checkpoints_between_calls_do_not_show(
    layout, six_at_once, megatron_ranks, tmp_path
):
    used = megatron_ranks(layout.ranks, train_and_use, layout, str(tmp_path))
    assert used == six_at_once(layout)
    saved = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert saved == ["iter_0000002", "iter_0000004", "iter_0000006"]


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_revert_brings_the_upstream_failure_back(layout, megatron_ranks):
    expected = NO_SYNC if layout.options else TIMER
    with pytest.raises(RankError, match=expected):
        megatron_ranks(layout.ranks, train_apply_revert, layout)


def train_with_a_custom_no_sync() -> None:
    """Runs on a rank: somebody's own `no_sync_func` in the config."""
    from contextlib import nullcontext

    megatron_idempotent.apply(strict=True)
    running = program.start(["--overlap-grad-reduce"])
    running.config.no_sync_func = nullcontext
    running.train(1)


def test_a_custom_no_sync_func_still_meets_upstreams_assertion(megatron_ranks):
    with pytest.raises(RankError, match=NO_SYNC):
        megatron_ranks(2, train_with_a_custom_no_sync)


class Interrupted(Exception):
    """An optimizer raises this."""


def train_interrupted(completed: int) -> tuple[bool, int]:
    """Runs on a rank: one call whose optimizer raises after `completed` iterations."""
    megatron_idempotent.apply(strict=True)
    running = program.start(OVERLAP, pp=2, vpp=2)
    step = running.optimizer.step
    steps = iter(range(completed))

    def step_or_fail():
        if next(steps, None) is None:
            raise Interrupted
        return step()

    # At a point that all ranks reach: a stage that fails alone leaves the others waiting for it.
    running.optimizer.step = step_or_fail
    with pytest.raises(Interrupted):
        running.train(4)
    return running.config.param_sync_func is not None, running.args.iteration


@pytest.mark.parametrize("completed", [0, 3])
def test_an_exception_leaves_param_sync_func_and_the_interrupted_iteration(
    completed, megatron_ranks
):
    for has_param_sync_func, iteration in megatron_ranks(2, train_interrupted, completed):
        assert has_param_sync_func
        assert iteration == completed


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        pytest.param(Layout(2, OVERLAP), None, id="dp2"),
        pytest.param(Layout(2, OVERLAP, pp=2), (2,), id="pp2, nothing on the first stage"),
        pytest.param(
            Layout(4, OVERLAP, pp=2, vpp=2, shared_config=True),
            (3,),
            id="pp2 vpp2 dp2, one chunk",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_train_again_with_adapters(megatron_ranks, layout, layers):
    how = {"adapted": {"layers": layers}, "timeout_s": 120}
    once = megatron_ranks(layout.ranks, train, layout, (4,), applied=False, **how)
    again = megatron_ranks(layout.ranks, train, layout, (2, 2), applied=True, **how)
    # Stock leaves `args.iteration` as it was.
    assert [each[:2] for each in again] == [each[:2] for each in once]
