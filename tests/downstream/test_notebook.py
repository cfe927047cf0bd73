"""Functions and classes of a notebook's cells, run on ranks by a real kernel."""

import os
import re
import sys

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

pytestmark = pytest.mark.full

CELLS = (
    """
from dataclasses import dataclass
import torch
from megatron_idempotent.proof import cpu

SCALE = 3

@dataclass
class Point:
    x: float

def scaled(x):
    return x * SCALE
""",
    """
def summed(point):
    import torch.distributed as dist
    total = torch.tensor([point.x + dist.get_rank()])
    dist.all_reduce(total)
    return Point(scaled(total.item()))

pool = cpu.RankPool(2, preload=("torch",))
points = pool.run(2, summed, Point(1.0))
print(points, all(type(each) is Point for each in points))
""",
    """
SCALE = 4  # a cell that is run again counts
def failing():
    raise ValueError(f"bad {SCALE}")
try:
    pool.run(2, failing)
except cpu.RankError as error:
    print(error.exception_type, error.message)
pool.close()
""",
    """
import megatron_idempotent
report = megatron_idempotent.apply()
print(report)
""",
    "report",
)


def test_what_cells_define_runs_on_ranks_and_a_report_breaks_no_word(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
    _, points, failed, printed, shown = ("".join(map(text, cell.outputs)) for cell in book.cells)
    assert "[Point(x=9.0), Point(x=9.0)] True" in points
    assert "ValueError bad 4" in failed
    assert max(map(len, printed.splitlines())) <= 80
    first, *_ = printed.splitlines()
    assert re.match(r"\d+ of \d+ ", first)
    assert shown.startswith("<Report ")


def text(output):
    return output.text if output.output_type == "stream" else output.data["text/plain"]
