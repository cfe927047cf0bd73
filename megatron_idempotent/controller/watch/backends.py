"""Adapts loggers of other libraries, and makes loggers by name."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_idempotent.controller.errors import SettingsError

from .rows import METRICS_FILE, JsonlLogger

if TYPE_CHECKING:
    from megatron_idempotent.controller.protocol import Logger

TENSORBOARD_DIRECTORY = "tensorboard"


class TensorBoardLogger:
    """TensorBoard scalars. Example: `tensorboard --logdir runs`."""

    def __init__(self, directory: Path, *, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides events at and behind the purge step that an interrupted run left.
        purge = first_step + 1 if first_step else None
        self._writer: Any = SummaryWriter(str(directory), purge_step=purge)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write every metric as a scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and end the writer's thread."""
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases, named as the directory is.

    Project, entity and mode are those of the environment (`WANDB_PROJECT`, `WANDB_ENTITY`,
    `WANDB_MODE=offline`); credentials are those of `wandb login`. Charts are over `step`, so a
    resumed run, which writes some steps again, may go back in it.
    Example: `WandbLogger(Path("runs/a"), project="grpo")`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        first_step: int = 0,
        project: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the run, or continue the one of that directory where `first_step` is above 0.

        Errors: `ModuleNotFoundError` without wandb, and its own where the server refuses.
        """
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{error}; pip install wandb, or take wandb out of the loggers"
            ) from error
        kept = directory / "wandb-run-id"
        run_id = kept.read_text(encoding="utf-8").strip() if first_step and kept.exists() else None
        self._run: Any = wandb.init(
            project=project,
            dir=str(directory),
            name=directory.resolve().name,
            config=dict(config or {}),
            id=run_id,
            resume="allow" if run_id else None,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        kept.write_text(f"{self._run.id}\n", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Hand the metrics to the run, which uploads them by itself."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Upload the rest and end the run."""
        self._run.finish()


def logger_factories(
    names: Sequence[str], directory: Path, *, first_step: int = 0
) -> list[Callable[[], Logger]]:
    """Returns factories for `Loggers`: `"jsonl"`, `"tensorboard"`, `"wandb"`, import paths.

    The callable at `"package.module:name"` is called with the directory and `first_step`, the step
    that a resumed run goes on from, and returns a logger. Nothing is built here, but a name that
    cannot be is told. Errors: `SettingsError`.
    """
    return [_factory(name, directory, first_step) for name in names]


def _factory(name: str, directory: Path, first_step: int) -> Callable[[], Logger]:
    make: Callable[..., Logger]
    if name == "jsonl":
        make, directory = JsonlLogger, directory / METRICS_FILE
    elif name == "tensorboard":
        _need("tensorboard", name)
        make, directory = TensorBoardLogger, directory / TENSORBOARD_DIRECTORY
    elif name == "wandb":
        _need("wandb", name)
        make = WandbLogger
    else:
        make = _imported(name)
    return functools.partial(make, directory, first_step=first_step)


def _need(package: str, name: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise SettingsError(
            f"loggers has {name!r}, and {package} is not installed; pip install {package}, or take "
            "it out"
        )


def _imported(path: str) -> Callable[..., Logger]:
    module_name, colon, name = path.partition(":")
    if not colon:
        raise SettingsError(
            f"loggers has {path!r}; allowed: jsonl, tensorboard, wandb, and package.module:callable"
        )
    if str(Path.cwd()) not in sys.path:  # a console script does not look there
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise SettingsError(f"loggers has {path!r}; {error}") from error
    make: Callable[..., Logger] | None = getattr(module, name, None)
    if make is None or not callable(make):
        raise SettingsError(f"loggers has {path!r}; {module_name} has no callable {name!r}")
    return make
