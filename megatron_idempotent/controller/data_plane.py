"""Complete groups, from their generation to the step that trains them, in this process."""

from __future__ import annotations

from collections.abc import Sequence

from .records import RolloutGroup


class MemoryPlane:
    """Keeps groups in a dictionary; a `protocol.DataPlane`. Groups are frozen, so none is copied.

    Example: `await plane.put(group); await plane.get(group.id)`.
    """

    def __init__(self) -> None:
        self._groups: dict[int, RolloutGroup] = {}

    def __len__(self) -> int:
        """Groups held."""
        return len(self._groups)

    def __bool__(self) -> bool:
        # By its length an empty plane would be false, and `plane or other` would not take it.
        return True

    async def put(self, group: RolloutGroup) -> None:
        """Keep a group, under its id; one that was made again takes the place of the first."""
        self._groups[group.id] = group

    async def get(self, group_id: int) -> RolloutGroup:
        """The group. Errors: `KeyError` for one that is not there."""
        try:
            return self._groups[group_id]
        except KeyError:
            raise KeyError(
                f"group {group_id} is not in the data plane: never put, or cleared"
            ) from None

    async def clear(self, group_ids: Sequence[int]) -> None:
        """Forget groups; unknown ids are fine."""
        for group_id in group_ids:
            self._groups.pop(group_id, None)

    async def close(self) -> None:
        """Forget all groups."""
        self._groups.clear()
