"""Whatever goes wrong, in whatever order: a run comes to its end, and nothing counts twice."""

from __future__ import annotations

import random

import pytest
from random_story import some_story, tell


@pytest.mark.parametrize("seed", range(45))
def test_runs_that_are_cut_short_and_go_on_keep_what_holds_for_one_run(seed: int) -> None:
    tell(some_story(random.Random(seed)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(1000, 6000, 100))
def test_a_hundred_more_of_them(first: int) -> None:
    for seed in range(first, first + 100):
        try:
            tell(some_story(random.Random(seed)))
        except BaseException as error:
            error.add_note(f"of the story with seed {seed}")
            raise
