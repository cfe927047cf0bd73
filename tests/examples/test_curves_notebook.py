"""The notebook of examples/ trains, and draws both pictures; it is committed without outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_idempotent.patching.decide import installed

NOTEBOOK = Path(__file__).parents[2] / "examples" / "curves.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
#: Prints how many pictures the cells of a notebook show, in the kernel of this Python.
EXECUTE = """
import sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
outputs = [each for cell in notebook.cells for each in cell.get("outputs", ())]
print(*[each for each in outputs if each.output_type == "stream"], file=sys.stderr)
print(sum("image/png" in each.get("data", ()) for each in outputs))
"""


def run(*arguments, cwd):
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_it_is_committed_without_outputs():
    for cell in CELLS:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None


def test_it_trains_and_draws_the_learning_curve_and_the_timeline(tmp_path, monkeypatch):
    needed = ("pydantic", "transformers", "matplotlib", "tomli_w")
    if installed("megatron-core") is None or not all(map(find_spec, needed)):
        pytest.skip("the notebook runs the trainer")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if find_spec("nbclient") and find_spec("ipykernel"):
        assert run("-c", EXECUTE, str(NOTEBOOK), cwd=tmp_path)[-1] == "2"
    else:
        program = "import sys\nsys.modules['IPython'] = None\n" + "\n".join(CODE)
        run("-c", program, cwd=tmp_path)
    drawn = sorted(path.name for path in tmp_path.glob("*/run/*.png"))
    assert drawn == ["curves.png", "learning-curve.png", "timeline.png"]
    for path in tmp_path.glob("*/run/*.png"):
        assert path.read_bytes().startswith(b"\x89PNG"), path
