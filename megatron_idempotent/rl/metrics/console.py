"""Shows a run as a live table on a terminal, or as a periodic line in a file."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import IO, Any

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


class LiveTable:
    """Redraws a table of two columns in place. Example: `LiveTable(sys.stderr).draw(rows)`."""

    def __init__(self, terminal: IO[str]) -> None:
        """Start drawing.

        Raises:
            ModuleNotFoundError: rich is not installed.
        """
        from rich.console import Console
        from rich.live import Live

        self._live = Live(
            console=Console(file=terminal),
            # Drawn by `draw` only: a refresh thread would take a core from the ranks.
            auto_refresh=False,
            # These would swallow what Megatron prints to the log file.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def draw(self, rows: Mapping[str, str]) -> None:
        """Draw a row per name."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, text in rows.items():
            table.add_row(Text(name, style="bold"), Text(text))
        self._live.update(table, refresh=True)

    def close(self) -> None:
        """Stop drawing, leaving the last table, and restore the cursor."""
        self._live.stop()


def live_table(output: IO[str]) -> LiveTable | None:
    """Return a live table if `output` is a terminal and rich is installed, else None."""
    if output.isatty():
        try:
            return LiveTable(output)
        except ModuleNotFoundError as error:
            print(f"no live table: {error}", file=sys.stderr)
    return None


class StatusTable:
    """Shows a controller's run: a live table on a terminal, else a line every `every_s` seconds.

    It is also a `Logger`, to get the latest metrics. Example: `StatusTable(sys.stderr, until=600)`.
    """

    def __init__(self, output: IO[str], *, until: int = 0, every_s: float = 30.0) -> None:
        """Take the output; `until` is the version at which the run ends, or 0 if unknown."""
        self._output, self._until, self._every_s = output, until, every_s
        self._table = live_table(output)
        self._metrics: Mapping[str, float] = {}
        self._last_s: float | None = None

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Update the latest value of each metric; thread-safe."""
        self._metrics = {**self._metrics, **metrics}

    def show(self, status: Mapping[str, Any], at_s: float) -> None:
        """Draw the table, or print a line if the last one is `every_s` old or the run has ended.

        `status` has the fields of `controller.Status`, and `at_s` is the time of a monotonic clock.
        """
        rows = self._rows(status)
        if self._table is not None:
            self._table.draw(rows)
        elif (
            self._last_s is None
            or at_s - self._last_s >= self._every_s
            or status["state"] == "ended"
        ):
            self._last_s = at_s
            print(
                *(f"{name} {text}" for name, text in rows.items() if name != "groups"),
                sep="  ",
                file=self._output,
                flush=True,
            )

    def close(self) -> None:
        """Leave the last table or line, and restore the cursor."""
        if self._table is not None:
            self._table.close()

    def _rows(self, status: Mapping[str, Any]) -> dict[str, str]:
        def number(name: str, form: str) -> str:
            return format(self._metrics[name], form) if name in self._metrics else "–"

        started = "may start" if status["rollouts_permitted"] else "none may start"
        counts = [
            f"{status['counts'].get(name, 0)} {name}"
            for name in ("submitted", "trained", "filtered", "evicted")
        ]
        return {
            "run": f"{status['state']}, epoch {status['epoch']}",
            "version": f"{status['trainer_version']}"
            f"{f' of {self._until}' if self._until else ''}, engines serve "
            f"{status['rollout_version']}",
            "reward": f"{number(REWARD, '.3f')}  loss {number(LOSS, '+.4f')}",
            "lag": f"mean {number(STALENESS_MEAN, '.2f')}  max {number(STALENESS_MAX, '.0f')}",
            "queues": f"{status['inflight_rollouts']} generating ({started})  "
            f"{status['ready_groups']} ready  {status['step_groups']} in the step",
            "groups": f"{', '.join(counts)}; wasted {number(WASTED_FRACTION, '.0%')}",
            "idle": f"trainer {number(TRAINER_IDLE_RATIO, '.0%')}  "
            f"engines {number(ENGINE_IDLE_RATIO, '.0%')}",
            "speed": f"{number(TOKENS_PER_S, '.0f')} tokens/s",
            "train pump": f"{status['doing'] or '–'}, last progress {status['idle_s']:.1f} s ago",
        }


async def keep_showing(
    table: StatusTable, ping: Callable[[], Awaitable[Any]], *, every_s: float = 1.0
) -> None:
    """Show the `Status` that `ping` returns now and every `every_s` seconds, until cancelled.

    On any error, such as a closed terminal, it prints a warning and returns.
    """
    loop = asyncio.get_running_loop()
    try:
        while True:
            table.show(dataclasses.asdict(await ping()), loop.time())
            await asyncio.sleep(every_s)
    except Exception as error:  # noqa: BLE001 (a display must not end the training)
        print(f"the live table failed and is dropped: {error!r}", file=sys.stderr)
