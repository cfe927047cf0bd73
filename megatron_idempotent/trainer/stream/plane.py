"""Chooses the data plane, in which complete groups wait for their step."""

from __future__ import annotations

from megatron_idempotent.controller import DataPlane, MemoryPlane
from megatron_idempotent.trainer.config import Config


def make_plane(config: Config) -> DataPlane:
    """The data plane that the configuration names."""
    if config.controller.plane == "memory":
        return MemoryPlane()
    from megatron_idempotent.controller.transfer_queue import TransferQueuePlane

    return TransferQueuePlane()
