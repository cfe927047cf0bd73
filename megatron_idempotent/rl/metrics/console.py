"""Shows a run as a live table on a terminal, or as a line now and then in a file."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import IO, TYPE_CHECKING, Any, Protocol

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


class LiveTable(Protocol):
    """Shows a run while it goes on. It is a `Logger` too, from which it has the last metrics."""

    def show(self, status: Status, at_s: float, *, engines: str = "") -> None:
        """Show the run's status.

        `at_s` is the time of any clock that does not go back; `engines` is a line about engines.
        """
        ...

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Keep metrics for the next `show`. It may be called from another thread."""
        ...

    def close(self) -> None:
        """Leave the last state on the screen, and give the cursor back. It may be called twice."""
        ...


def make_table(terminal: IO[str], *, until: int = 0, every_s: float = 30.0) -> LiveTable:
    """Return a live table if `terminal` is a terminal and rich is installed, else `StatusLines`.

    `until` is the version at which the run ends, or 0 if that is not known. `StatusLines` print a
    line every `every_s` seconds.
    """
    if terminal.isatty():
        try:
            return TerminalTable(terminal, until=until)
        except ModuleNotFoundError as error:
            print(f"no live table: {error}", file=sys.stderr)
    return StatusLines(terminal, until=until, every_s=every_s)


async def keep_showing(
    table: LiveTable,
    ping: Callable[[], Awaitable[Status]],
    *,
    every_s: float = 1.0,
    engines: Callable[[], str] = str,
) -> None:
    """Show the status now and every `every_s` seconds, until it is cancelled.

    If anything raises, such as a terminal that is gone, it prints a warning and returns.
    `ping` returns the status, and `engines` a line about engines.
    """
    loop = asyncio.get_running_loop()
    try:
        while True:
            table.show(await ping(), loop.time(), engines=engines())
            await asyncio.sleep(every_s)
    except Exception as error:  # noqa: BLE001 (what is shown must not cost the training)
        print(f"the live table failed and is dropped: {error!r}", file=sys.stderr)


def rows(
    status: Mapping[str, Any], metrics: Mapping[str, float], *, until: int = 0, engines: str = ""
) -> list[tuple[str, str]]:
    """Return the table's rows, each a name and a text. A metric that is not there yet is a dash.

    `status` has the fields of `Status`; `until` is the last version, or 0 if it is not known.
    """
    counts = status["counts"]
    started = "may start" if status["rollouts_permitted"] else "none may start"
    version = f"{status['trainer_version']}{f' of {until}' if until else ''}"
    left = [f"{counts.get(name, 0)} {name}" for name in ("trained", "filtered", "evicted")]
    told = [
        ("run", f"{status['state']}, epoch {status['epoch']}"),
        ("version", f"{version}, engines serve {status['rollout_version']}"),
        ("reward", f"{_number(metrics, REWARD, '.3f')}  loss {_number(metrics, LOSS, '+.4f')}"),
        (
            "lag",
            f"mean {_number(metrics, STALENESS_MEAN, '.2f')}  "
            f"max {_number(metrics, STALENESS_MAX, '.0f')}",
        ),
        (
            "queues",
            f"{status['inflight_rollouts']} generating ({started})  "
            f"{status['ready_groups']} ready  {status['step_groups']} in the step",
        ),
        (
            "groups",
            f"{counts.get('submitted', 0)} submitted: {', '.join(left)}; "
            f"wasted {_number(metrics, WASTED_FRACTION, '.0%')}",
        ),
        (
            "idle",
            f"trainer {_number(metrics, TRAINER_IDLE_RATIO, '.0%')}  "
            f"engines {_number(metrics, ENGINE_IDLE_RATIO, '.0%')}",
        ),
        ("speed", f"{_number(metrics, TOKENS_PER_S, '.0f')} tokens/s"),
        ("train pump", f"{status['doing'] or '–'}, last progress {status['idle_s']:.1f} s ago"),
    ]
    return [*told, ("engines", engines)] if engines else told


def line(
    status: Mapping[str, Any], metrics: Mapping[str, float], *, until: int = 0, engines: str = ""
) -> str:
    """Return the status and the main metrics in one line, for a log; see `rows`."""
    version = f"{status['trainer_version']}{f'/{until}' if until else ''}"
    return (
        f"version {version} (engines {status['rollout_version']})  "
        f"reward {_number(metrics, REWARD, '.3f')}  loss {_number(metrics, LOSS, '+.4f')}  "
        f"lag {_number(metrics, STALENESS_MEAN, '.2f')}  "
        f"generating {status['inflight_rollouts']}  ready {status['ready_groups']}  "
        f"idle trainer {_number(metrics, TRAINER_IDLE_RATIO, '.0%')} "
        f"engines {_number(metrics, ENGINE_IDLE_RATIO, '.0%')}  "
        f"{_number(metrics, TOKENS_PER_S, '.0f')} tokens/s  {status['doing'] or status['state']}"
        f"{f'  ({engines})' if engines else ''}"
    )


class TerminalTable:
    """Draws a table again and again in the same place. Example: `make_table(sys.stderr)`."""

    def __init__(self, terminal: IO[str], *, until: int = 0) -> None:
        """Start drawing. Errors: `ModuleNotFoundError` without rich."""
        from rich.console import Console
        from rich.live import Live

        self._until = until
        self._metrics: Mapping[str, float] = {}
        self._live = Live(
            console=Console(file=terminal),
            # Drawn when there is something new: a thread would take a core from the ranks.
            auto_refresh=False,
            # These would swallow what Megatron prints to the log file.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def show(self, status: Status, at_s: float, *, engines: str = "") -> None:
        """Draw the table."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, told in rows(
            dataclasses.asdict(status), self._metrics, until=self._until, engines=engines
        ):
            table.add_row(Text(name, style="bold"), Text(told))
        self._live.update(table, refresh=True)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Keep the metrics, and earlier ones that this row lacks."""
        self._metrics = {**self._metrics, **metrics}

    def close(self) -> None:
        """Stop drawing."""
        self._live.stop()


class StatusLines:
    """Prints a line every `every_s` seconds, for files. Example: `StatusLines(sys.stdout)`."""

    def __init__(self, output: IO[str], *, until: int = 0, every_s: float = 30.0) -> None:
        self._output = output
        self._until = until
        self._every_s = every_s
        self._metrics: Mapping[str, float] = {}
        self._last_s: float | None = None

    def show(self, status: Status, at_s: float, *, engines: str = "") -> None:
        """Print a line if the last one is `every_s` old, or the run has ended."""
        fields = dataclasses.asdict(status)
        due = self._last_s is None or at_s - self._last_s >= self._every_s
        if due or fields["state"] == "ended":
            self._last_s = at_s
            told = line(fields, self._metrics, until=self._until, engines=engines)
            print(told, file=self._output, flush=True)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Keep the metrics, and earlier ones that this row lacks."""
        self._metrics = {**self._metrics, **metrics}

    def close(self) -> None:
        """Do nothing."""


def _number(metrics: Mapping[str, float], name: str, form: str) -> str:
    return format(metrics[name], form) if name in metrics else "–"
