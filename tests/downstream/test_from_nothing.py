"""docs/doors.md's five commands lead from an empty folder to the first report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import uv

pytestmark = [pytest.mark.full, pytest.mark.exhaustive]

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs" / "doors.md").read_text("utf-8").partition("## From nothing")[2]
BLOCKS = re.findall(r"### (\S+)\n.*?```sh\n(.*?)```\n\n```text\n(.*?)\n```", SECTION, re.DOTALL)
SOURCES = {"slime": "SLIME_SOURCE", "verl": "VERL_SOURCE", "NeMo-RL": "NEMO_RL_SOURCE"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheels")
    built = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(built, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize(("framework", "commands", "output"), BLOCKS)
def test_the_first_report_is_five_commands_away(wheels, tmp_path, framework, commands, output):
    source = os.environ.get(SOURCES[framework])
    if not source:
        pytest.skip(f"{SOURCES[framework]} names no checkout")
    without_texts = re.sub(r"\\\n|<<'EOF'.*?\nEOF\n", "", commands, flags=re.DOTALL)
    assert len(without_texts.splitlines()) == 5
    # The checkout is what this test was given, and the package is this tree.
    cloned = f'git() {{ ln -s "{source}" "$(basename "$4")"; }}\n'
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MEGATRON_IDEMPOTENT")}
    path = [Path(uv.find_uv_bin()).parent, Path(sys.executable).resolve().parent, kept["PATH"]]
    done = subprocess.run(
        ["bash", "-ec", cloned + commands],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={
            **kept,
            "PATH": os.pathsep.join(map(str, path)),
            "UV_FIND_LINKS": str(wheels),
            # NeMo-RL attaches to any cluster of this machine, and a socket's path is short.
            "RAY_TMPDIR": tempfile.mkdtemp(dir="/tmp"),
        },
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    last = re.sub(r"[1-9]\d* patches", "N patches", done.stdout.splitlines()[-1])
    assert last == output, done.stdout


def test_each_framework_of_the_page_is_run():
    assert [framework for framework, _, _ in BLOCKS] == list(SOURCES)
