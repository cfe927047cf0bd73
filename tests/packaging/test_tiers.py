"""The default tier leaves files out and says so; what runs again is named; a slow run fails."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from starts import loaded, started

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
FILES = {
    "pytest.ini": """
        [pytest]
        addopts = -m "not exhaustive" --reruns=2 --only-rerun="died with signal SIG(ABRT|SEGV)"
        markers =
            full: in `make test-all`
            exhaustive: by itself
    """,
    "test_cheap.py": """
        def test_that_is_cheap():
            pass
    """,
    "test_costly.py": """
        import pytest
        pytestmark = pytest.mark.full
        def test_that_is_costly():
            pass
        @pytest.mark.exhaustive
        def test_that_takes_hours():
            pass
    """,
    "test_flaky.py": """
        from pathlib import Path
        def test_a_rank_dies():
            fault = Path(__file__).with_name("fault")
            if fault.exists():
                fault.unlink()
                raise RuntimeError("rank 1 died with signal SIGSEGV\\nat reduce.py:12")
    """,
}


@pytest.fixture
def tests(tmp_path):
    """A folder of tests with this project's conftest.py."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    for name, text in FILES.items():
        lines = text.splitlines()
        (tmp_path / name).write_text("\n".join(line[8:] for line in lines))
    return tmp_path


def run(folder: Path, *arguments: object) -> tuple[int, list[str]]:
    """Run pytest in the folder; return its exit code and its lines."""
    # Plugins that are installed here take seconds to import, and are not what is tested.
    plugins = ("-p", "pytest_rerunfailures", "-p", "xdist")
    done = started(
        *(sys.executable, "-m", "pytest", *plugins, *arguments),
        cwd=folder,
        PYTEST_DISABLE_PLUGIN_AUTOLOAD=1,
    )
    return done.returncode, done.stdout.splitlines()


DIES = "test_flaky.py::test_a_rank_dies"
NOT_RUN = "1 tests of the full tier were not run: `make test-all` runs them."


@pytest.mark.parametrize(
    ("arguments", "passed", "last"),
    [
        ((), 2, NOT_RUN),
        (("-n", "2"), 2, NOT_RUN),
        (("--full",), 3, None),
        (("test_costly.py",), 1, None),
        (("test_costly.py::test_that_is_costly", "-n", "1"), 1, None),
        (("-m", "exhaustive"), 1, NOT_RUN),
    ],
    ids=str,
)
def test_the_full_tier_runs_where_it_is_asked_for(arguments, passed, last, tests):
    code, lines = run(tests, *arguments)
    assert code == 0, lines
    (summary,) = [line for line in lines if re.search(r"\d+ passed", line)]
    assert f"{passed} passed" in summary
    assert lines[-1] == (last or summary)


def test_what_runs_again_is_named_and_fails_the_second_time_in_a_week(tests):
    for expected in (0, 1):
        (tests / "fault").touch()
        code, lines = run(tests)
        assert code == expected
        assert f"{DIES}: RuntimeError: rank 1 died with signal SIGSEGV" in lines
    assert f"FAILED: {DIES} ran again for the second time in a week." in lines
    assert run(tests)[0] == 0
    # A week later it is forgotten.
    (file,) = tests.glob(".pytest_cache/v/megatron-idempotent/*")
    file.write_text(re.sub(r"20\d\d", "2020", file.read_text()))
    (tests / "fault").touch()
    assert run(tests)[0] == 0


def test_a_run_above_its_limit_fails_and_says_so(tests):
    code, lines = run(tests, "--limit", "0.0001", "--budget", "0.0001")
    assert code == 1
    assert "FAILED: the tests took 0.0 minutes, and may take 0.0001." in lines
    assert any("SLOWER THAN THE BUDGET" in line for line in lines)
    assert run(tests, "--limit", "10")[0] == 0


def test_searches_of_the_process_come_first_and_then_long_tests(tmp_path):
    conftest = loaded(ROOT / "tests" / "conftest.py")
    first = [*conftest.SEARCHING, *conftest.LONG]
    assert [name for name in first if not (ROOT / name).exists()] == []
    files = [name if name.endswith(".py") else f"{name}test_it.py" for name in first]
    for name in ("tests/a_folder/test_any.py", *files):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("def test_it():\n    pass\n")
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    code, lines = run(tmp_path, "--collect-only", "-q")
    assert code == 0, lines
    tests = [line.partition("::")[0] for line in lines if "::" in line]
    searching = len(conftest.SEARCHING)
    assert sorted(tests[:searching]) == sorted(files[:searching])
    assert sorted(tests[searching:-1]) == sorted(files[searching:])
