"""A block that one rank leaves is left by all, wherever they are; outside of one nobody waits."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from ranks import on_ranks

from megatron_idempotent.window import agreement

DONE = "All is as it was."


class Broken(BaseException):
    """Is no Exception, as SystemExit and torch's CheckpointException."""


def block(failing: str) -> str:
    """Leave a block with a nested one on rank 1, at a place, and return what this rank is told."""
    here = dist.get_rank() == 1

    def pass_by(place: str) -> None:
        if here and place == failing:
            raise Broken(place)

    try:
        with agreement.as_one(DONE):
            pass_by("at first")
            with agreement.as_one("not told"):
                agreement.meet(DONE)
                pass_by("between")
            agreement.meet(DONE)
            pass_by("at last")
    except (Broken, agreement.WindowAborted) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@on_ranks(2)
def test_all_ranks_leave_a_block_that_one_leaves():
    for place in ("at first", "between", "at last"):
        own = f"Broken: {place}"
        told = f"WindowAborted: rank 1: {own}. {DONE}"
        assert block(place) == (own if dist.get_rank() == 1 else told)
    assert block("nowhere") == "nothing"


def test_outside_of_a_block_an_error_is_raised_at_once():
    agreement.meet(DONE)
    with pytest.raises(OSError, match="no file"):
        agreement.meet(DONE, OSError("no file"))
