"""The live table on a terminal, or a line now and then where the output is a file."""

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
    from megatron_idempotent.controller.protocol import Status


class LiveTable(Protocol):
    """Shows a run while it goes on; a `Logger` as well, for the last metrics."""

    def show(self, status: Status | Mapping[str, Any], at_s: float, *, engines: str = "") -> None:
        """Show where the run stands, at a time of any clock that does not go back.

        `status` may be the answer of `ask`; `engines` is a line about them.
        """
        ...

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Keep metrics for the next `show`. May be called from another thread."""
        ...

    def close(self) -> None:
        """Leave the last state on the screen and give the cursor back. Twice: no-op."""
        ...


def make_table(terminal: IO[str], *, until: int = 0, every_s: float = 30.0) -> LiveTable:
    """Return a table where `terminal` is one and rich is installed; else a line every `every_s`.

    `until` is the version that the run ends at, 0 for not known.
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
    """Show the status now and every `every_s`, until it is cancelled.

    A terminal that is gone, or anything else that raises, ends the showing with a warning and
    nothing else.
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
    """Returns the table's rows: a name and a text. Metrics that are not there yet are a dash."""
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
    """Return the same in one line, for a log."""
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
    """A table that is drawn over itself. Example: `make_table(sys.stderr, until=200)`."""

    def __init__(self, terminal: IO[str], *, until: int = 0) -> None:
        """Errors: `ModuleNotFoundError` without rich."""
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

    def show(self, status: Status | Mapping[str, Any], at_s: float, *, engines: str = "") -> None:
        """Draw the table."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, told in rows(_fields(status), self._metrics, until=self._until, engines=engines):
            table.add_row(Text(name, style="bold"), Text(told))
        self._live.update(table, refresh=True)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Keep the metrics; a row without one leaves what it was."""
        self._metrics = {**self._metrics, **metrics}

    def close(self) -> None:
        """Stop drawing."""
        self._live.stop()


class StatusLines:
    """One line every `every_s`, for logs and pipes. Example: `StatusLines(sys.stdout)`."""

    def __init__(self, output: IO[str], *, until: int = 0, every_s: float = 30.0) -> None:
        self._output = output
        self._until = until
        self._every_s = every_s
        self._metrics: Mapping[str, float] = {}
        self._last_s: float | None = None

    def show(self, status: Status | Mapping[str, Any], at_s: float, *, engines: str = "") -> None:
        """Print a line where the last one is old enough, or the run has ended."""
        fields = _fields(status)
        due = self._last_s is None or at_s - self._last_s >= self._every_s
        if due or fields["state"] == "ended":
            self._last_s = at_s
            told = line(fields, self._metrics, until=self._until, engines=engines)
            print(told, file=self._output, flush=True)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Keep the metrics; a row without one leaves what it was."""
        self._metrics = {**self._metrics, **metrics}

    def close(self) -> None:
        """Nothing is held."""


def _fields(status: Status | Mapping[str, Any]) -> Mapping[str, Any]:
    return status if isinstance(status, Mapping) else dataclasses.asdict(status)


def _number(metrics: Mapping[str, float], name: str, form: str) -> str:
    return format(metrics[name], form) if name in metrics else "–"
