"""Groups that the data plane is to forget, even if it cannot at once."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from .protocol import DataPlane
from .shared import Shared

_log = logging.getLogger(__name__)


class Clearing:
    """Clears groups, and makes up for what failed. Example: `await clearing.clear([3, 4])`."""

    def __init__(self, shared: Shared, plane: DataPlane) -> None:
        self._shared = shared
        self._plane = plane
        self._owed: set[int] = set()

    async def clear(self, group_ids: Iterable[int]) -> None:
        """Have the data plane forget groups. A failure is nobody's: it is tried again later."""
        self._owed.update(group_ids)
        ids = sorted(self._owed)
        if not ids:
            return
        try:
            await self._plane.clear(ids)
        except Exception as error:  # noqa: BLE001 (a store of others; what it was for is done)
            _log.warning("%d groups are not cleared yet: %r", len(ids), error)
            self._shared.retries["clear"] += 1
        else:
            self._owed.difference_update(ids)

    def owe(self, group_id: int) -> None:
        """A group that may be in the data plane, and that nobody will ask for."""
        self._owed.add(group_id)

    def renewed(self, group_id: int) -> None:
        """Keeps a group from being cleared that was put again under its id after a restore."""
        self._owed.discard(group_id)
