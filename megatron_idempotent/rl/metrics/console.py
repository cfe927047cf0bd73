"""Shows a run as a live table on a terminal, or as a periodic line in a file."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import IO, Any

from . import names


class Progress:
    """Shows named texts to a user: on a terminal as a table that is redrawn, otherwise as lines.

    Example: `Progress(sys.stderr).draw({"reward": "0.4"}, due=True)`.
    """

    _only_in_tables, _separator = "", "  "

    def __init__(self, output: IO[str]) -> None:
        """Start a live table if `output` is a terminal and rich is installed."""
        self._output, self._live = output, None
        if not output.isatty():
            return
        try:
            from rich.console import Console
            from rich.live import Live
        except ModuleNotFoundError as error:
            print(f"no live table: {error}", file=sys.stderr)
            return
        self._live = Live(
            console=Console(file=output),
            # Drawn by `draw` only: a refresh thread would take a core from the ranks.
            auto_refresh=False,
            # These would swallow what Megatron prints to the log file.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def draw(self, texts: Mapping[str, str], *, due: bool) -> None:
        """Redraw the live table, a row per text. Without a table, print the texts as one line if
        `due` is True, except the one named `_only_in_tables`.
        """
        if self._live is not None:
            from rich.table import Table
            from rich.text import Text

            table = Table.grid(padding=(0, 2))
            for name, text in texts.items():
                table.add_row(Text(name, style="bold"), Text(text))
            self._live.update(table, refresh=True)
        elif due:
            parts = [f"{name} {texts[name]}" for name in texts if name != self._only_in_tables]
            print(self._separator.join(parts), file=self._output, flush=True)

    def close(self) -> None:
        """Stop the live table, if any: its last content stays, and the cursor is restored."""
        if self._live is not None:
            self._live.stop()


class RolloutProgress(Progress):
    """Shows the metrics of a synchronous run: a table on a terminal, otherwise a line per
    evaluation.

    It is a `Logger`. Example: `RolloutProgress(sys.stderr, rollouts=150)`.
    """

    _only_in_tables, _separator = "left", " "

    def __init__(self, output: IO[str], *, rollouts: int) -> None:
        super().__init__(output)
        self._rollouts, self._held_out = rollouts, float("nan")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Draw the table with a step's metrics. Without a terminal, print a line if the metrics
        include a held-out reward.
        """
        self._held_out = metrics.get(names.HELD_OUT, self._held_out)
        trained = names.REWARD in metrics  # step 0 has an evaluation only
        texts = {"rollout": f"{step}/{self._rollouts}"}
        if trained:
            texts["reward"] = f"{metrics[names.REWARD]:.3f}"
        texts["held-out"] = f"{self._held_out:.3f}"
        if trained:
            texts |= {
                "loss": f"{metrics[names.LOSS]:+.3f}",
                "grad": f"{metrics[names.GRAD_NORM]:.1f}",
            }
            texts["speed"] = f"{metrics[names.TOKENS_PER_S]:.0f} tok/s"
        left_s = (self._rollouts - step) * metrics.get(names.TOTAL_S, 0.0)
        self.draw(texts | {"left": f"{left_s / 60:.0f} min"}, due=names.HELD_OUT in metrics)


class StatusTable(Progress):
    """Shows the status of a controller's run: a live table on a terminal, else a line every
    `every_s` seconds.

    It is also a `Logger`, to get the latest metrics. Example: `StatusTable(sys.stderr, until=600)`.
    """

    _only_in_tables = "groups"

    def __init__(self, output: IO[str], *, until: int = 0, every_s: float = 30.0) -> None:
        """Start a live table if `output` is a terminal; `until` is the version at which the run
        ends, or 0 if unknown.
        """
        super().__init__(output)
        self._until, self._every_s, self._last_s = until, every_s, -math.inf
        self._metrics: Mapping[str, float] = {}

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Remember the latest value of each metric, for the next `show`; thread-safe."""
        self._metrics = {**self._metrics, **metrics}

    def show(self, status: Mapping[str, Any], at_s: float) -> None:
        """Draw the table of a run's status. Without a terminal, print a line if the run has ended,
        or if the last line was printed at least `every_s` seconds ago.

        `status` has the fields of `controller.Status`, and `at_s` is the time of a monotonic clock.
        """
        due = at_s - self._last_s >= self._every_s or status["state"] == "ended"
        self._last_s = at_s if due else self._last_s
        self.draw(self._rows(status), due=due)

    def _rows(self, status: Mapping[str, Any]) -> dict[str, str]:
        def number(name: str, form: str) -> str:
            return format(self._metrics[name], form) if name in self._metrics else "–"

        started = "may start" if status["rollouts_permitted"] else "none may start"
        counts = [
            f"{status['counts'].get(name, 0)} {name}"
            for name in ("submitted", "trained", "filtered", "evicted")
        ]
        until = f" of {self._until}" if self._until else ""
        return {
            "run": f"{status['state']}, epoch {status['epoch']}",
            "version": f"{status['trainer_version']}{until}, engines serve "
            f"{status['rollout_version']}",
            "reward": f"{number(names.REWARD, '.3f')}  loss {number(names.LOSS, '+.4f')}",
            "lag": f"mean {number(names.STALENESS_MEAN, '.2f')}  "
            f"max {number(names.STALENESS_MAX, '.0f')}",
            "queues": f"{status['inflight_rollouts']} generating ({started})  "
            f"{status['ready_groups']} ready  {status['step_groups']} in the step",
            "groups": f"{', '.join(counts)}; wasted {number(names.WASTED_FRACTION, '.0%')}",
            "idle": f"trainer {number(names.TRAINER_IDLE_RATIO, '.0%')}  "
            f"engines {number(names.ENGINE_IDLE_RATIO, '.0%')}",
            "speed": f"{number(names.TOKENS_PER_S, '.0f')} tokens/s",
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
