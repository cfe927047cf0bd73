"""The controller's program in docs/controller.md prints what the page says."""

import asyncio
import re
import runpy
from pathlib import Path

import pytest

from benchmarks import _virtual_clock

pytest.importorskip("pydantic")
PAGE = Path(__file__).parents[3] / "docs" / "controller.md"


def test_the_program_of_the_page_prints_what_the_page_says(tmp_path, capsys, monkeypatch):
    page = PAGE.read_text("utf-8")
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    (shown,) = re.findall(r"\n\n((?:    version .*\n)+(?:    .*\n)+)", page)
    (tmp_path / "program.py").write_text(program)
    # Without the time that a busy machine adds, groups come in one order.
    monkeypatch.setattr(asyncio, "run", _virtual_clock.run)
    runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
    assert capsys.readouterr().out.split() == shown.split()
