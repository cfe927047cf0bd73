"""Shows a run as a live table on a terminal, or as a periodic line in a file."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import IO, TYPE_CHECKING

from .names import (
    ENGINE_IDLE_RATIO,
    LOSS,
    REWARD,
    STALENESS_MAX,
    STALENESS_MEAN,
    TOKENS_PER_S,
    TRAINER_IDLE_RATIO,
    WASTED_FRACTION,
)

if TYPE_CHECKING:
    from megatron_idempotent.rl.controller.protocol import Status


class StatusLines:
    """Prints a line every `every_s` seconds, for files. Example: `StatusLines(sys.stdout)`.

    It is also a `Logger`, to get the latest metrics.
    """

    def __init__(self, output: IO[str], *, until: int = 0, every_s: float = 30.0) -> None:
        """Take the output; `until` is the version at which the run ends, or 0 if unknown."""
        self._output = output
        self._until = until
        self._every_s = every_s
        self._metrics: Mapping[str, float] = {}
        self._last_s: float | None = None

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Update the latest value of each metric; thread-safe."""
        self._metrics = {**self._metrics, **metrics}

    def show(self, status: Status, at_s: float) -> None:
        """Print a line if the last one is `every_s` old, or the run has ended.

        `at_s` is the time of a monotonic clock.
        """
        due = self._last_s is None or at_s - self._last_s >= self._every_s
        if due or status.state == "ended":
            self._last_s = at_s
            print(self._line(status), file=self._output, flush=True)

    def close(self) -> None:
        """Do nothing: the last line stays."""

    def _line(self, status: Status) -> str:
        version = f"{status.trainer_version}{f'/{self._until}' if self._until else ''}"
        return (
            f"version {version} (engines {status.rollout_version})  "
            f"reward {self._number(REWARD, '.3f')}  loss {self._number(LOSS, '+.4f')}  "
            f"lag {self._number(STALENESS_MEAN, '.2f')}  "
            f"generating {status.inflight_rollouts}  ready {status.ready_groups}  "
            f"idle trainer {self._number(TRAINER_IDLE_RATIO, '.0%')} "
            f"engines {self._number(ENGINE_IDLE_RATIO, '.0%')}  "
            f"{self._number(TOKENS_PER_S, '.0f')} tokens/s  {status.doing or status.state}"
        )

    def _number(self, name: str, form: str) -> str:
        """Format a metric, or a dash if it has no value yet."""
        return format(self._metrics[name], form) if name in self._metrics else "–"


class TerminalTable(StatusLines):
    """Redraws a table in place on a terminal. Example: `make_table(sys.stderr)`."""

    def __init__(self, terminal: IO[str], *, until: int = 0) -> None:
        """Start drawing.

        Raises:
            ModuleNotFoundError: rich is not installed.
        """
        from rich.console import Console
        from rich.live import Live

        super().__init__(terminal, until=until)
        self._live = Live(
            console=Console(file=terminal),
            # Drawn by `show` only: a refresh thread would take a core from the ranks.
            auto_refresh=False,
            # These would swallow what Megatron prints to the log file.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def show(self, status: Status, at_s: float) -> None:
        """Draw the table."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, text in self._rows(status):
            table.add_row(Text(name, style="bold"), Text(text))
        self._live.update(table, refresh=True)

    def close(self) -> None:
        """Stop drawing, and restore the cursor."""
        self._live.stop()

    def _rows(self, status: Status) -> list[tuple[str, str]]:
        counts, number = status.counts, self._number
        started = "may start" if status.rollouts_permitted else "none may start"
        version = f"{status.trainer_version}{f' of {self._until}' if self._until else ''}"
        done_counts = [
            f"{counts.get(name, 0)} {name}" for name in ("trained", "filtered", "evicted")
        ]
        return [
            ("run", f"{status.state}, epoch {status.epoch}"),
            ("version", f"{version}, engines serve {status.rollout_version}"),
            ("reward", f"{number(REWARD, '.3f')}  loss {number(LOSS, '+.4f')}"),
            ("lag", f"mean {number(STALENESS_MEAN, '.2f')}  max {number(STALENESS_MAX, '.0f')}"),
            (
                "queues",
                f"{status.inflight_rollouts} generating ({started})  "
                f"{status.ready_groups} ready  {status.step_groups} in the step",
            ),
            (
                "groups",
                f"{counts.get('submitted', 0)} submitted: {', '.join(done_counts)}; "
                f"wasted {number(WASTED_FRACTION, '.0%')}",
            ),
            (
                "idle",
                f"trainer {number(TRAINER_IDLE_RATIO, '.0%')}  "
                f"engines {number(ENGINE_IDLE_RATIO, '.0%')}",
            ),
            ("speed", f"{number(TOKENS_PER_S, '.0f')} tokens/s"),
            ("train pump", f"{status.doing or '–'}, last progress {status.idle_s:.1f} s ago"),
        ]


def make_table(terminal: IO[str], *, until: int = 0, every_s: float = 30.0) -> StatusLines:
    """Return a live table if `terminal` is a terminal and rich is installed, else `StatusLines`.

    `until` is the version at which the run ends, or 0 if unknown. `StatusLines` prints a line every
    `every_s` seconds.
    """
    if terminal.isatty():
        try:
            return TerminalTable(terminal, until=until)
        except ModuleNotFoundError as error:
            print(f"no live table: {error}", file=sys.stderr)
    return StatusLines(terminal, until=until, every_s=every_s)


async def keep_showing(
    table: StatusLines, ping: Callable[[], Awaitable[Status]], *, every_s: float = 1.0
) -> None:
    """Show the status that `ping` returns now and every `every_s` seconds, until it is cancelled.

    On any error, such as a closed terminal, it prints a warning and returns.
    """
    loop = asyncio.get_running_loop()
    try:
        while True:
            table.show(await ping(), loop.time())
            await asyncio.sleep(every_s)
    except Exception as error:  # noqa: BLE001 (a display must not end the training)
        print(f"the live table failed and is dropped: {error!r}", file=sys.stderr)
