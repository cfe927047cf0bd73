"""The asynchronous run under torchrun: every process that it starts is a rank.

    torchrun --nproc-per-node 2 --max-restarts 3 -m megatron_idempotent train --async --out runs/a

Rank 0 starts the controller, a process of its own that outlives the ranks' restarts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_idempotent.trainer.config import load_config
from megatron_idempotent.trainer.errors import ConfigError
from megatron_idempotent.trainer.job import Job

_RANKS = "MEGATRON_IDEMPOTENT_TORCHRUN_RANKS"


def serve_rank(config_file: Path | None, overrides: Sequence[str], argv: Sequence[str]) -> int:
    """Be a rank until the run ends; returns the controller's exit code.

    Errors: `ConfigError` without an output directory, which the ranks and the controller share.
    """
    from megatron_idempotent.trainer.stream.ranks import worker_spec
    from megatron_idempotent.workers import run_rank

    os.environ[_RANKS] = os.environ["WORLD_SIZE"]
    config = load_config(config_file, [*overrides, *torchrun_overrides()])
    if not config.run.out:
        raise ConfigError("run.out is empty, and torchrun was used; name a directory with --out")
    job = Job(config=config, out=Path(config.run.out))
    command = [sys.executable, "-m", "megatron_idempotent", "train", *argv, "--controller"]
    return run_rank(worker_spec(job), job.out, command)


def torchrun_overrides() -> list[str]:
    """Returns the settings that torchrun decides: the number of ranks."""
    return [f"run.ranks={os.environ[_RANKS]}", "controller.cluster=torchrun"]
