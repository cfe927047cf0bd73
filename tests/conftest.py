"""Temporary files go where pytest puts its own, and a run that outlives its budget says so.

`tiers.txt` names the tests that `make test` leaves to the matrix or to the weekly run.
"""

from __future__ import annotations

import atexit
import gc
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

_STARTED_S = time.monotonic()
TIERS = Path(__file__).with_name("tiers.txt")
#: Lines of TIERS that name no test of a file that was collected as a whole.
STALE = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", type=float, metavar="MINUTES", help="say so if it takes longer")


def tiers() -> dict[str, str]:
    """Return the marker of each test that TIERS names."""
    lines = filter(None, TIERS.read_text("utf-8").splitlines())
    said = (line.partition(" ") for line in lines if not line.startswith("#"))
    return {f"tests/{test}": marker for marker, _, test in said}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what TIERS names, before `-m` chooses."""
    left = tiers()
    for item in items:
        if (marker := left.pop(item.nodeid, None)) is not None:
            item.add_marker(marker)
    whole = {item.nodeid.partition("::")[0] for item in items if "::" not in str(config.args)}
    config.stash[STALE] = [test for test in left if test.partition("::")[0] in whole]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what collection makes to no garbage collection, then or later.

    With torch and 8,000 tests it lives as long as the process, and each walk over it takes 0.5 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # libraries in C report what the end of Python leaves


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say so at the end, below the slowest tests, if all took longer than they may; none fails."""
    minutes, budget = (time.monotonic() - _STARTED_S) / 60, config.getoption("--budget")
    if budget is None or minutes <= budget:
        return
    told = (
        f"The tests took {minutes:.1f} minutes. Their budget is {budget:g} on an idle machine with "
        f"two cores; this one has {os.cpu_count()}, and a load of {os.getloadavg()[2]:.1f}. "
        "The slowest are above (make test BUDGET=… for another budget)."
    )
    terminalreporter.section("SLOWER THAN THE BUDGET", sep="!", red=True, bold=True)
    terminalreporter.write_line(told, red=True)
    if "GITHUB_ACTIONS" in os.environ:  # shown on the page of the run
        terminalreporter.write_line(f"::warning title=Slower than the budget::{told}")


@pytest.fixture
def stale_tiers(pytestconfig: pytest.Config) -> list[str]:
    """List the tests that TIERS names and files do not have, of those collected as a whole."""
    return pytestconfig.stash[STALE]


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let this process, ranks and programs make their temporary files in a folder of pytest's.

    wandb, torchrun and multiprocessing leave theirs where a process ends without its exit
    handlers, as ranks do. pytest removes its folders after three runs.
    """
    usual = tempfile.gettempdir()
    folder = str(tmp_path_factory.mktemp("t"))  # short: sockets lie in it, whose paths are limited
    kept = {
        # The paths of Ray's sockets are too long for a folder of pytest's.
        "RAY_TMPDIR": usual,
        # What Inductor compiles is used by the next run too.
        "TORCHINDUCTOR_CACHE_DIR": str(Path(usual, f"torchinductor_{os.getuid()}")),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in kept.items():
            patch.setenv(name, os.environ.get(name, value))
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session")
def kernel_ranks() -> Iterator[Callable[..., list[Any]]]:
    """Act as `megatron_ranks`, with Triton and its interpreter imported, and nothing of Megatron.

    The interpreter rounds as a GPU does, and Triton's kernels are what is used.
    """
    from triton_interpreter import interpreted

    from megatron_idempotent.proof.cpu import RankPool

    with RankPool(4, preload=("torch", "triton", "pytest")) as pool:

        def run(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
            # The first call imports Triton, and each takes the environment to its ranks.
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TRITON_INTERPRET", "1")
                patch.setenv("MEGATRON_IDEMPOTENT_TRITON", "1")
                return pool.run(ranks, interpreted, function, *arguments, timeout_s=300.0)

        yield run
