"""Runs a vLLM server and its client in one process, for a Ray actor on each node."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence

from megatron_idempotent.rl.weights.transports.base import Sender

from .vllm import VllmEngine, VllmServer

_log = logging.getLogger(__name__)


class ServedVllm(VllmEngine):
    """A `VllmEngine` that owns its server, which listens on this machine only.

    If the server dies, this process ends too, so that Ray starts both again.

    Example: `RayEngine("a", lambda: ServedVllm(VllmServer(folder), name="a", transport=…), …)`.
    """

    def __init__(
        self,
        server: VllmServer,
        *,
        name: str,
        transport: Callable[[], Sender],
        routing_layers: Sequence[int] = (),
    ) -> None:
        """Start the server, and wait until it responds.

        Args:
            server: the server, which is not running yet.
            name: see `VllmEngine`.
            transport: makes the sender of each update, from this process to the server's workers.
            routing_layers: see `VllmEngine`.

        Raises:
            RuntimeError: the server does not start; the error has the end of its log.
        """
        self._server = server.__enter__()
        try:
            super().__init__(
                server.url, name=name, transport=transport, routing_layers=routing_layers
            )
        except BaseException:
            server.stop()
            raise
        threading.Thread(target=self._end_with_server, name=f"server {name}", daemon=True).start()

    def _end_with_server(self) -> None:
        code = self._server.wait()
        if not self._closed:
            _log.error(
                "vLLM of engine %s ended with %d; its log ends:\n%s",
                self.name,
                code,
                self._server.log(),
            )
            self._server.stop()
            os._exit(1)

    async def close(self) -> None:
        """See `RolloutEngine.close`. Stops the server, too."""
        await super().close()
        await asyncio.to_thread(self._server.stop)
