"""The job that the parent gives to every rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_idempotent.trainer.config import Config
from megatron_idempotent.trainer.task.prompts import SHIPPED_FILE

#: Hugging Face checkpoints in the output directory: what a run without one began from, and its end.
INITIAL, TRAINED = "model-initial", "model"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One start of a run. `out` exists; `resume_from` is a complete checkpoint in it, or None.

    Example: `Job(config=Config(), out=Path("runs/a"))`.
    """

    config: Config
    out: Path
    resume_from: Path | None = None
    quiet: bool = False


def data_path(config: Config) -> Path:
    """The prompt file: the configured one, or the one that ships with the project."""
    return Path(config.task.data) if config.task.data else SHIPPED_FILE
