"""A run in which any process dies, anywhere, goes on to the bits of one in which nothing died."""

from __future__ import annotations

import dataclasses
import functools
import signal
from pathlib import Path

import pytest

pytest.importorskip("transformers")  # comes with the extra `trainer`

import recovery_cases
import recovery_command
from recovery_cases import PHASES, TURNS, planned

from megatron_idempotent.rl.workers.torchrun import EXIT_FILE

pytestmark = recovery_cases.MARKS
STARTS = {"embedded": recovery_command.train, "torchrun": recovery_command.train_under_torchrun}


@pytest.fixture(scope="session")
def launched(megatron_rank_pool, tmp_path_factory):
    def launched(runner, mode, *kills, start=None, more=()):
        folder = tmp_path_factory.mktemp("r")
        start = start or STARTS[runner]
        return recovery_cases.launch(
            megatron_rank_pool, folder, runner, mode, *kills, start=start, more=more
        )

    return launched


@pytest.fixture(scope="session")
def whole(launched):
    """Return what is found in and left by a run on this machine in which nothing dies."""
    of_mode = functools.cache(lambda mode: launched("embedded", mode))

    def whole(runner, mode):
        run = of_mode(mode)
        left = run.left()
        if runner == "torchrun":  # which keeps what ranks print
            left = {name for name in left if not name.startswith("logs/")} | {EXIT_FILE}
        return run.found(), left

    return whole


_SHORT = {("embedded", "sync", 0, 6), ("embedded", "async", 0, 18), ("torchrun", "async", 0, 30)}


@pytest.mark.parametrize(
    ("runner", "mode", "turn", "first"), recovery_cases.pieces("embedded", "torchrun", short=_SHORT)
)
def test_a_run_that_is_killed_ends_with_the_bits_of_one_that_is_not(
    runner, mode, turn, first, launched, whole
):
    kills = recovery_cases.piece(runner, mode, turn, first)
    # Every second one sends deltas, and its engines are compared with those of whole updates.
    more = ("sync.deltas=true",) if (turn + first // recovery_cases.IN_A_ROW) % 2 else ()
    recovery_cases.check(launched(runner, mode, *kills, more=more), *whole(runner, mode))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dying", "codes"),
    [
        # The ranks go on; those of the next torchrun wait, and take their place when one is lost.
        ([("before a step", 3, "launcher"), ("evaluation", 1, "rank 1")], [-signal.SIGKILL, 0]),
        # Nobody files how the controller ended: ranks are started again, and find nothing to do.
        ([("publish: pause", 1, "supervisor")], [0]),
    ],
)
def test_a_run_outlives_torchrun_and_what_waits_for_its_controller(dying, codes, launched, whole):
    kills = {kill.phase: kill for kill in planned("torchrun", "async", 0)}
    run = launched(
        *("torchrun", "async"),
        *(dataclasses.replace(kills[phase], nth=nth, who=who) for phase, nth, who in dying),
        start=recovery_command.train_under_real_torchrun,
    )
    recovery_cases.check(run, *whole("torchrun", "async"))
    assert run.codes == codes


def test_the_page_has_a_row_for_each_phase_and_says_who_dies_in_it():
    page = (Path(__file__).parents[3] / "docs" / "recovery.md").read_text()
    for phase in PHASES:
        cells = []
        for runner, mode in TURNS:
            kills = [*planned(runner, mode, 0), *planned(runner, mode, 1)]
            who = [kill.who for kill in kills if kill.phase == phase]
            cells.append(", ".join(dict.fromkeys(who)) or "–")
        assert f"| {phase} | {' | '.join(cells)} |" in page
