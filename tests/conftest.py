"""Temporary files of libraries go where pytest puts its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let this process, ranks and programs make their temporary files in a folder of pytest's.

    wandb, torchrun and multiprocessing leave theirs behind where a process ends without its exit
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
