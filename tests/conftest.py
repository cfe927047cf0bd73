"""Two tiers of tests, what ran again, how long it may take, and where temporary files go.

A file of the full tier says `pytestmark = pytest.mark.full`. `make test` leaves it out and says so
in its last line; `make test-all`, which has `--full`, runs it, and so does a command that names it.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import gc
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

_STARTED_S = time.monotonic()
#: How many tests of the full tier this process, or one of its workers, has left out.
LEFT_OUT = pytest.StashKey[int]()
#: Files whose tests take up to half a minute. At the end of a run one worker would have the last of
#: them, and the others nothing to do.
LONG = (
    "tests/rl/trainer/",
    "tests/parity/test_reductions.py",
    "tests/proof/certify/test_planted.py",
)
#: Files whose tests search all objects of the process. That takes 0.15 s at the start of a run, and
#: 1.4 s once other tests have imported a lot.
SEARCHING = (
    "tests/patching/test_detours.py",
    "tests/patching/test_live.py",
    "tests/patching/test_neighbours.py",
    "tests/patching/test_surroundings.py",
)
#: In pytest's cache: test → days on which it was run again.
RERUNS = "megatron-idempotent/reruns"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the full tier, too")
    parser.addoption("--budget", type=float, metavar="MINUTES", help="say so if it takes longer")
    parser.addoption("--limit", type=float, metavar="MINUTES", help="fail if it takes longer")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out files of the full tier, unless they are asked for; put searches and long tests
    first.
    """
    items.sort(
        key=lambda item: (not item.nodeid.startswith(SEARCHING), not item.nodeid.startswith(LONG))
    )
    config.stash[LEFT_OUT] = 0
    if config.getoption("--full"):
        return
    named = {
        Path(config.invocation_params.dir, argument.partition("::")[0]).resolve()
        for argument in config.args
    }
    left_out = [
        item
        for item in items
        if item.get_closest_marker("full")
        and not item.get_closest_marker("exhaustive")  # `-m` chooses these
        and item.path not in named
    ]
    if left_out:
        without = set(left_out)
        items[:] = [item for item in items if item not in without]
        config.hook.pytest_deselected(items=left_out)
        config.stash[LEFT_OUT] = len(left_out)


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


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker of xdist has left out; each of them collects all tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Fail a run above its limit, or with a test that ran again twice in a week; name its tier."""
    config = session.config
    left_out = config.stash.get(LEFT_OUT, 0)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = left_out
        return (yield)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    limit = config.getoption("--limit")
    too_slow = limit is not None and _minutes() > limit
    flaky = _flaky(config, {report.nodeid for report in reporter.stats.get("rerun", ())})
    if (too_slow or flaky) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    try:
        return (yield)
    finally:
        faults = [f"{test} ran again for the second time in a week" for test in flaky]
        if too_slow:
            faults.append(f"the tests took {_minutes():.1f} minutes, and may take {limit:g}")
        for fault in faults:
            reporter.write_line(f"FAILED: {fault}.", red=True)
        if left_out:
            reporter.write_line(
                f"{left_out} tests of the full tier were not run: `make test-all` runs them."
            )


def _minutes() -> float:
    return (time.monotonic() - _STARTED_S) / 60


def _flaky(config: pytest.Config, rerun: set[str]) -> list[str]:
    """Record which tests ran again today; return those that also did in the last seven days."""
    cache = config.cache if config.pluginmanager.has_plugin("cacheprovider") else None
    if cache is None or not rerun:
        return []
    today = datetime.date.today()
    week = {str(today - datetime.timedelta(days=days)) for days in range(8)}
    days_of = {
        test: recent
        for test, days in cache.get(RERUNS, {}).items()
        if (recent := [day for day in days if day in week])
    }
    flaky = sorted(rerun & days_of.keys())
    for test in rerun:
        days_of[test] = [*days_of.get(test, ()), str(today)]
    cache.set(RERUNS, days_of)
    return flaky


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Name what ran again and why, and a run that took longer than its budget."""
    reruns = terminalreporter.stats.get("rerun", ())
    if reruns:
        terminalreporter.section("RAN AGAIN", sep="!", yellow=True)
    for report in reruns:
        lines = str(report.longrepr).strip().splitlines()
        reason = [line for line in lines if "died with signal" in line] or lines
        error = reason[-1].removeprefix("E").strip()
        terminalreporter.write_line(f"{report.nodeid}: {error}", yellow=True)
    budget = config.getoption("--budget")
    if budget is None or _minutes() <= budget:
        return
    explanation = (
        f"The tests took {_minutes():.1f} minutes. Their budget is {budget:g} on an idle machine "
        f"with two cores; this one has {os.cpu_count()}, and a load of {os.getloadavg()[2]:.1f}. "
        "The slowest are above (make test BUDGET=… for another budget)."
    )
    terminalreporter.section("SLOWER THAN THE BUDGET", sep="!", red=True, bold=True)
    terminalreporter.write_line(explanation, red=True)
    if "GITHUB_ACTIONS" in os.environ:  # shown on the page of the run
        terminalreporter.write_line(f"::warning title=Slower than the budget::{explanation}")


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


@pytest.fixture
def megatron_ranks(
    request: pytest.FixtureRequest, megatron_ranks: Callable[..., list[Any]]
) -> Callable[..., list[Any]]:
    """Give ranks all patches from their start in tests marked `patched`, which spares each rank the
    time of `apply()`.
    """
    if request.node.get_closest_marker("patched") is None:
        return megatron_ranks
    return functools.partial(megatron_ranks, already_applied=True)


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
