"""Each rule of `make lint` about this repository sees the fault that it is there for."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

import pytest
from starts import loaded

pytest.importorskip("tomllib", reason="Python 3.10 has none")
pytest.importorskip("yaml", reason="PyYAML is for development, not for the matrix")

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
#: A rule → its faults: a file, a text of it, what stands there instead, a part of the message.
FAULTS = {
    # The rule reads these files early, and the test stops reading at the message it looks for.
    "docstrings_are_sentences": [
        ("megatron_idempotent/auto.py", '"""', '"""Of ', "auto.py:1 begins with 'Of': say it"),
        ("megatron_idempotent/auto.py", '"""', '"""Makes anew ', "auto.py:1 says 'anew'"),
        (
            "megatron_idempotent/checkout.py",
            "\ndef ",
            '\ndef f():\n    """`f`."""\ndef ',
            "f begins without a verb",
        ),
    ],
    "the_map_shows_what_is_there": [
        ("CONTRIBUTING.md", "`patching/api.py`", "`patching/no.py`", "no.py, which is not there"),
        ("CONTRIBUTING.md", "← metrics", "← mtrics", "picture of the wings lacks metrics"),
        ("CONTRIBUTING.md", "    patches/", "  no/\n    patches/", "differ in no"),
    ],
    "readme_says_how_large_each_part_is": [
        ("README.md", "| `rl/` |", "| `no/` |", "README.md says [0, 0] files and lines of `rl/`")
    ],
    "blocks_import_what_they_name": [
        ("docs/concepts.md", "# ", "```python\nTrainStep\n```\n# ", "a block uses TrainStep")
    ],
    "releases_are_those_of_the_table": [
        ("Makefile", "TORCH ?= ", "TORCH ?= 0", "Makefile: TORCH is not"),
        ("pyproject.toml", 'python = ">=3.10"', 'python = ">=3.9"', "requires-python is not"),
        ("README.md", "Tested on megatron-core 0", "1", "README.md lacks: megatron-core"),
        ("docs/use.md", "`trainer`", "`none`", "lacks the extra `trainer`"),
        ("patches/_generated/proven.json", '"0.12.3"', '"0.12.2"', "run `make matrix`"),
    ],
    "the_lock_has_what_is_asked_for_and_its_hashes": [
        ("requirements/dev.lock", "\nwrapt==", "\nwrapt==0.", "for wrapt"),
        ("requirements/dev.lock", "--hash=sha256:", "--hash=md5:", "has no hash for"),
        ("requirements/dev.lock", "# via", "# via /home", "names a path"),
    ],
    "workflows_run_all_tests": [
        ("Makefile", "WING_rl := tests/rl", "WING_rl := tests/step", "is in 2 wings of ci.yml"),
        (".github/workflows/weekly.yml", "tests: tests/parity", "tests: tests/fp8", "in 0 shards"),
        (".github/workflows/ci.yml", "run: make lint", "run: true", "`make lint`, and no job"),
    ],
}


def rules() -> ModuleType:
    return loaded(ROOT / ".ci" / "rules.py")


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the files of this project that rules read."""
    folder = tmp_path_factory.mktemp("project") / "project"
    leave = shutil.ignore_patterns(".git", ".venv", ".nox", "build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, folder, ignore=leave)
    return folder


def test_every_rule_has_a_fault():
    assert [rule.__name__ for rule in rules().RULES] == [*FAULTS]


@pytest.mark.parametrize("name", FAULTS)
def test_a_rule_sees_its_faults(name, copy):
    rule = getattr(rules(), name)
    for file, text, fault, message in FAULTS[name]:
        path = copy / file
        before = path.read_text("utf-8")
        assert text in before, (file, text)
        path.write_text(before.replace(text, fault, 1), "utf-8")
        try:
            assert any(message in line for line in rule(copy)), fault
        finally:
            path.write_text(before, "utf-8")


def test_the_rule_of_wings_is_not_told_by_a_make_above_it_what_to_run(monkeypatch):
    monkeypatch.setenv("MAKEFLAGS", " -- ARGS=tests/step")
    monkeypatch.setenv("ARGS", "tests/step")
    assert list(rules().workflows_run_all_tests(ROOT)) == []
