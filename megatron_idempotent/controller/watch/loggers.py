"""Several loggers as one that never raises and, on a thread of its own, never waits."""

from __future__ import annotations

import functools
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from megatron_idempotent.controller.protocol import Logger

_Record = tuple[dict[str, float], int]


class Loggers:
    """A logger that raises is dropped, with a warning on standard error, and never called again: a
    full disk must not cost the training.

    `threaded` is for an event loop: records go to one background thread, where factories are called
    and all loggers run. Up to `queued` records wait there; what does not fit is left out and
    counted in `left_out`. Example: `Loggers([lambda: JsonlLogger(path)], threaded=True)`.
    """

    def __init__(
        self,
        loggers: Sequence[Logger | Callable[[], Logger]],
        *,
        threaded: bool = False,
        queued: int = 1_000,
        close_timeout_s: float = 30.0,
        lent: bool = False,
    ) -> None:
        """Take loggers, or what makes them: for those that hold locks or threads, or are slow to
        build. One that cannot be built is left out, with a warning. `close` leaves loggers open
        that are `lent`.
        """
        self._loggers: list[Logger] = []
        self._given = list(loggers)
        self._queued = queued
        self._close_timeout_s = close_timeout_s
        self._lent = lent
        self._left_out = 0
        self._closed = False
        # Bounded by hand: a full queue must take the record that ends it.
        self._records: queue.SimpleQueue[_Record | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if threaded:
            # A daemon: a logger that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="loggers", daemon=True)
            self._thread.start()
        else:
            self._build()

    @property
    def working(self) -> tuple[Logger, ...]:
        """The loggers that were built and have not raised."""
        return tuple(self._loggers)

    @property
    def left_out(self) -> int:
        """Records that no logger gets: the queue was full, or the loggers were closed."""
        return self._left_out

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Hand the metrics to every logger that still works; threaded, without waiting.

        After `close` they are left out.
        """
        if self._closed:
            self._left_out += 1
        elif self._thread is None:
            self._log(metrics, step)
        elif self._records.qsize() < self._queued:
            self._records.put((dict(metrics), step))
        else:
            if not self._left_out:
                print(
                    f"loggers are {self._queued} records behind; what does not fit is left out",
                    file=sys.stderr,
                )
            self._left_out += 1

    def close(self) -> None:
        """Hand over what is queued, and close every logger that still works. Twice: no-op.

        Threaded, it waits up to `close_timeout_s` for what is queued, so a loop that still has
        something to do calls it from a thread.
        """
        if self._closed:
            return
        self._closed = True
        if self._thread is None:
            self._close()
            return
        self._records.put(None)
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            print(
                f"loggers did not end in {self._close_timeout_s:g} s, with "
                f"{max(self._records.qsize() - 1, 0)} records still queued; they are left behind",
                file=sys.stderr,
            )
        if self._left_out:
            print(f"{self._left_out} records of metrics were left out", file=sys.stderr)

    def _run(self) -> None:
        self._build()
        while (record := self._records.get()) is not None:
            self._log(*record)
        self._close()

    def _build(self) -> None:
        for given in self._given:
            with _DroppedIfItRaises(given, self._loggers):
                self._loggers.append(_made(given))

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        for logger in self.working:
            with _DroppedIfItRaises(logger, self._loggers):
                logger.log(metrics, step=step)

    def _close(self) -> None:
        for logger in () if self._lent else self.working:
            with _DroppedIfItRaises(logger, self._loggers):
                logger.close()


def _made(given: Logger | Callable[[], Logger]) -> Logger:
    # A class has the attribute as well, and is what makes the logger.
    if isinstance(given, type) or not hasattr(given, "log"):
        return cast("Callable[[], Logger]", given)()
    return cast("Logger", given)


class _DroppedIfItRaises:
    """Takes a logger off the list when it raises, whatever it raises short of an interrupt."""

    def __init__(self, logger: Logger | Callable[[], Logger], loggers: list[Logger]) -> None:
        self._logger = logger
        self._loggers = loggers

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if exc_type is None or not issubclass(exc_type, Exception):
            return False
        # Printed and not raised: stderr is the run's log file, where it can be found later.
        print(
            f"{_name(self._logger)} failed and is dropped: {exc_type.__name__}: {exc}",
            file=sys.stderr,
        )
        self._loggers[:] = [each for each in self._loggers if each is not self._logger]
        return True


def _name(logger: Any) -> str:
    if isinstance(logger, functools.partial):
        return _name(logger.func)
    return str(getattr(logger, "__qualname__", type(logger).__name__))
