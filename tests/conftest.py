"""Temporary files of libraries go where pytest puts its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


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
