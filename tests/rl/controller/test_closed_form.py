"""The staleness that groups have when they are trained is what Little's law says, to the group."""

import pytest

pytest.importorskip("pydantic")

from benchmarks.async_staleness import measure

pytestmark = pytest.mark.full


@pytest.mark.parametrize(("engines", "window"), [(2, 0), (2, 1), (8, 2), (32, 3)])
def test_the_groups_of_window_plus_one_steps_are_under_way_and_no_other(engines, window):
    cell = measure(engines, window, window + 4)
    assert cell.sum_of_staleness == cell.closed_form
    assert (cell.sum_of_staleness > 0) == (window > 0)
    assert cell.staleness <= window


def test_a_run_that_is_too_short_to_fill_its_window_is_refused():
    with pytest.raises(ValueError, match="--steps is 5; a staleness of 4 takes 7 or more"):
        measure(8, 4, 5)
