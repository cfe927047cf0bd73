"""The process that pays for the imports once and then forks fresh ranks for every call.

Fresh ranks are what makes calls independent: model parallel groups, Megatron's globals, RNG
trackers, patches, the environment, all are as after the import. A fork costs milliseconds where
the imports cost seconds. The launcher runs no torch operation and starts no thread, so that
forking it is safe. It ends when its pool's end of the connection closes, and its ranks with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import logging
import pickle
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from megatron_idempotent.cpu.choice import Device
from megatron_idempotent.cpu.errors import NoDeviceError
from megatron_idempotent.cpu.gpu import check_untouched, prepare
from megatron_idempotent.cpu.rank import describe
from megatron_idempotent.cpu.round import PoolGone, Round
from megatron_idempotent.cpu.runtime import enable


def main(connection_fd: int, modules: Sequence[str], device: Device = "cpu") -> None:
    """Import `modules`, then serve calls until the connection closes.

    With the runtime on, or for ranks on a GPU without it, and without starting the driver.
    """
    connection = Connection(connection_fd)
    with _ReportTo(connection):
        if device == "cuda":
            prepare()
        else:
            enable()
        for name in modules:
            if importlib.util.find_spec(name.partition(".")[0]) is None:
                continue  # a pool without Megatron runs plain torch functions
            if name.count(".") == 0 or _exists(name):
                _import(name)
                if device == "cuda":
                    check_untouched(name)
        _read_ahead()
    # Upstream reports every bucket and setting at level INFO; a call may lower the level again.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # Ranks share these pages with us as long as no collection writes into them.
    gc.freeze()
    connection.send("ready")
    with contextlib.suppress(EOFError, PoolGone, ConnectionResetError, BrokenPipeError):
        while True:
            call = pickle.loads(connection.recv_bytes())
            connection.send(Round(call, connection).run())


def _import(name: str) -> None:
    """Import a module, unless it needs a package that is not installed."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or importlib.util.find_spec(error.name.partition(".")[0]) is not None:
            raise


def _read_ahead() -> None:
    """Read what patches compare of upstream's code, so that no rank's `apply()` has to."""
    from megatron_idempotent.engine import catalogue, compiled, decide

    for patch in catalogue.patches().values():
        decide.check_bodies(patch, named=False)
        for target in patch.targets:
            file = getattr(sys.modules.get(target.module), "__file__", None)
            if file is not None:
                compiled.kept(file)


def _exists(name: str) -> bool:
    parent, _, _ = name.rpartition(".")
    if parent.count(".") and not _exists(parent):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is a namespace without this part
        return False


class _ReportTo:
    """Tells the pool why the imports failed; it waits for the word "ready"."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        return None

    def __exit__(self, exc_type: object, exc: BaseException | None, tb: object) -> None:
        if exc is not None:
            self._connection.send(describe(-1, type(exc), exc, exc.__traceback__))
        if isinstance(exc, NoDeviceError):
            raise SystemExit(1)  # the pool says it; a traceback would say no more
