"""The controller's own fleet, which adds up what its weight syncs take."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from megatron_idempotent.controller.fleet import Fleet
from megatron_idempotent.sync import SyncSettings

from .scenario import Scenario


class MeasuredFleet(Fleet):
    """Example: `fleet.pause_s / fleet.sync_s`."""

    pause_s = 0.0
    """Seconds in which engines were paused."""
    sync_s = 0.0
    """Seconds of all publishes."""
    syncs = 0

    async def publish(self, version: int) -> Mapping[str, float]:
        """See `Generator.publish`."""
        started = asyncio.get_running_loop().time()
        try:
            metrics = await super().publish(version)
        finally:
            self.sync_s += asyncio.get_running_loop().time() - started
        self.syncs += 1
        self.pause_s += metrics["pause_s"]
        return metrics


def sync_settings(scenario: Scenario) -> SyncSettings:
    """Returns the scenario's settings; limits that it does not name stay the defaults."""
    sync = scenario.sync
    return SyncSettings(
        pause_mode=sync.pause_mode,
        attempts=sync.attempts,
        retry_wait_s=sync.retry_wait_s,
        bucket_timeout_s=sync.bucket_timeout_s,
        commit_timeout_s=sync.commit_timeout_s,
    )
