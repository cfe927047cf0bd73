"""A run in which any process dies, anywhere, goes on to the bits of one in which nothing died."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

pytest.importorskip("transformers")  # comes with the extra `trainer`

import recovery_cases
import recovery_command
from recovery_cases import PHASES, TURNS, planned

pytestmark = [pytest.mark.full, *recovery_cases.MARKS]
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

    def whole(mode):
        run = launched("embedded", mode)
        return run.found(), run.left()

    return functools.cache(whole)


_SHORT = {("embedded", "sync", 0, 6), ("embedded", "async", 0, 18), ("torchrun", "sync", 0, 12)}


@pytest.mark.parametrize(
    ("runner", "mode", "turn", "first"), recovery_cases.pieces("embedded", "torchrun", short=_SHORT)
)
def test_a_run_that_is_killed_ends_with_the_bits_of_one_that_is_not(
    runner, mode, turn, first, launched, whole
):
    kills = recovery_cases.piece(runner, mode, turn, first)
    # Every second one sends deltas, and its engines are compared with those of whole updates.
    more = ("sync.deltas=true",) if (turn + first // recovery_cases.IN_A_ROW) % 2 else ()
    recovery_cases.check(launched(runner, mode, *kills, more=more), *whole(mode))


def test_the_page_has_a_row_for_each_phase_and_says_who_dies_in_it():
    page = (Path(__file__).parents[3] / "docs" / "recovery.md").read_text()
    for phase in PHASES:
        cells = []
        for runner, mode in TURNS:
            kills = [*planned(runner, mode, 0), *planned(runner, mode, 1)]
            who = [kill.who for kill in kills if kill.phase == phase]
            cells.append(", ".join(dict.fromkeys(who)) or "–")
        assert f"| {phase} | {' | '.join(cells)} |" in page
