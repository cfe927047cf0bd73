"""A run in which any process dies, anywhere, goes on to the bits of one in which nothing died."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

pytest.importorskip("transformers")  # comes with the extra `trainer`

import recovery_cases
import recovery_command
from recovery_cases import PHASES, TURNS, planned

from megatron_idempotent.rl.workers.torchrun import EXIT_FILE

pytestmark = recovery_cases.MARKS


@pytest.fixture(scope="session")
def launched(megatron_rank_pool, tmp_path_factory):
    def launched(runner, mode, *kills):
        folder = tmp_path_factory.mktemp("r")
        start = recovery_command.train
        if runner == "torchrun":
            start = recovery_command.train_under_torchrun
        return recovery_cases.launch(megatron_rank_pool, folder, runner, mode, *kills, start=start)

    return launched


@pytest.fixture(scope="session")
def whole(launched):
    """Return what is found in and left by a run in which nothing dies."""

    @functools.cache
    def whole(mode):
        run = launched("embedded", mode)
        return run.found(), run.left()

    return whole


_SHORT = {("embedded", "sync", 0, 6), ("embedded", "async", 0, 18), ("torchrun", "async", 0, 24)}


@pytest.mark.parametrize(
    ("runner", "mode", "turn", "first"), recovery_cases.pieces("embedded", "torchrun", short=_SHORT)
)
def test_a_run_that_is_killed_ends_with_the_bits_of_one_that_is_not(
    runner, mode, turn, first, launched, whole
):
    found, left = whole(mode)
    if runner == "torchrun":  # which keeps what ranks print
        left = {name for name in left if not name.startswith("logs/")} | {EXIT_FILE}
    recovery_cases.check_killed_row(launched, (found, left), runner, mode, turn, first)


def test_the_page_has_a_row_for_each_phase_and_says_who_dies_in_it():
    page = (Path(__file__).parents[3] / "docs" / "recovery.md").read_text()
    for phase in PHASES:
        cells = []
        for runner, mode in TURNS:
            kills = [*planned(runner, mode, 0), *planned(runner, mode, 1)]
            who = [kill.who for kill in kills if kill.phase == phase]
            cells.append(", ".join(dict.fromkeys(who)) or "–")
        assert f"| {phase} | {' | '.join(cells)} |" in page
