"""The documentation lists what changes nothing of an open step; a signal's exit is not lost."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from contract_disturbances import HARMLESS, Doing
from ranks import on_ranks
from scenario import Bench

pytestmark = pytest.mark.full


@on_ranks(1)
def test_an_exit_by_a_signal_goes_through_a_loss() -> None:
    """A handler that ends the process on SIGTERM is not the loss's own."""

    def end(number: int, frame: Any) -> None:
        sys.exit(7)

    before = signal.signal(signal.SIGTERM, end)
    try:
        bench = Bench()
        with pytest.raises(SystemExit, match="7"):
            bench.run([bench.batch(1)], loss=Doing(lambda *_: signal.raise_signal(signal.SIGTERM)))
        bench.step.abort()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_page_names_what_changes_nothing() -> None:
    page = (Path(__file__).parents[2] / "docs" / "train-step" / "failures.md").read_text("utf-8")
    section = page.partition("## What disturbs an open step?\n")[2].partition("\n## ")[0]
    section = " ".join(section.split())
    for name in (*HARMLESS, "`torch.autograd.grad()` of the output in the loss"):
        assert f"{name}; " in section or f"{name}. " in section, name
