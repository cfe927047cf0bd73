"""The ranks of one start, and how they are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from .connection import Connection
from .errors import RanksLost


class Life:
    """The ranks of one start, until one is lost and all are ended."""

    def __init__(
        self,
        connections: Sequence[Connection],
        ended: Callable[[int | None], Awaitable[str]],
    ) -> None:
        """
        Args:
            connections: by rank.
            ended: sees that all ranks end, in bounded time; what is known of how one ended.
        """
        self.connections = list(connections)
        self.doing = ""
        """The method that runs; empty while none does."""
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why, once all ranks are ended."""
        self._ended = ended
        self._ending: asyncio.Task[None] | None = None
        for connection in self.connections:
            connection.on_end = self._gone
        for connection in self.connections:
            if connection.ended:
                self._gone(connection, connection.ended)

    @property
    def is_ending(self) -> bool:
        """True if a rank was lost, or all are being ended."""
        return self._ending is not None

    def lose(self, why: str, rank: int | None = None) -> None:
        """End all ranks; the first reason is the one that is told."""
        if self._ending is None:
            for connection in self.connections:
                connection.shut()
            self._ending = asyncio.get_running_loop().create_task(self._end(why, rank))

    async def why(self) -> RanksLost:
        """The error for a call, once all ranks are ended."""
        return RanksLost(await asyncio.shield(self.lost))

    def _gone(self, connection: Connection, why: str) -> None:
        rank = connection.hello.rank
        when = f"in {self.doing}()" if self.doing else "while idle"
        self.lose(f"rank {rank} was lost {when}: {why}", rank)

    async def _end(self, why: str, rank: int | None) -> None:
        try:
            known = await self._ended(rank)
        except Exception as error:  # noqa: BLE001 (a pending call must get an answer)
            known = f"and they may not have ended: {error!r}"
        for connection in self.connections:
            await connection.closed()
        known = f" ({known})" if known else ""
        self.lost.set_result(f"{why}{known}; all ranks were ended, and start() makes new ones")
