"""Buckets in Ray's store: one copy of each, however many engines it goes to."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from megatron_idempotent.engine.per_process import PerProcessDict
from megatron_idempotent.weights import Bucket

from .wire import pack


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Held:
    """One bucket, for as long as some engine is to take it. Example: `held.ref`."""

    key: tuple[Any, int]
    bucket: Bucket
    """Kept, so that no other one gets its id."""
    storing: asyncio.Future[Any]
    users: int = 0

    @property
    def ref(self) -> Any:
        """The reference that Ray passes on."""
        return self.storing.result()

    def release(self) -> None:
        """One engine has it, or wants it no more; once for each `hold`."""
        self.users -= 1
        if not self.users:
            _held.pop(self.key, None)


_held: dict[tuple[Any, int], Held] = PerProcessDict(__name__, "_held")


async def hold(ray: Any, bucket: Bucket) -> Held:
    """Copy a bucket into the store, or share the copy that is there for another engine.

    On return its sender may free or change it. Errors: Ray's, where the store has no room.
    """
    loop = asyncio.get_running_loop()
    key = (loop, id(bucket))
    if key not in _held:
        # In a thread: tens of milliseconds for a large one.
        storing = asyncio.ensure_future(asyncio.to_thread(lambda: ray.put(pack(bucket))))
        _held[key] = Held(key=key, bucket=bucket, storing=storing)
    held = _held[key]
    held.users += 1
    try:
        await asyncio.wait({held.storing})
        held.ref  # noqa: B018 - raises what went wrong
    except BaseException:
        held.release()
        raise
    return held
