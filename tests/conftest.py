"""Temporary files go where pytest puts its own, and a run that outlives its budget says so."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_STARTED_S = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", type=float, metavar="MINUTES", help="say so if it takes longer")


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
