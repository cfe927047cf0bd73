"""Starts groups as capacity and the sampler allow, and commits complete ones to the buffer."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from typing import Any

from .protocol import EnginesLost, GroupsRejected, PoisonedPrompt, RolloutGroup
from .samplers import chosen
from .state import RunState, StoredGroups

_log = logging.getLogger(__name__)


class RolloutPump:
    """The loop that starts the generation of groups, retries failed groups, aborts stale ones, and
    stores complete ones.

    Example: `await RolloutPump(shared, stored).run()`, which goes on until it is cancelled.
    """

    def __init__(self, shared: RunState, stored: StoredGroups) -> None:
        self._shared, self._stored = shared, stored
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._tracks: set[int] = set()
        self._error: BaseException | None = None
        # Since the last group that the recipe did not reject; ids and rewards of the last three.
        self._rejected = 0
        self._last_rejected: deque[str] = deque(maxlen=3)

    async def run(self) -> None:
        """Start groups whenever there is room, and abort stale ones; never returns.

        Raises:
            SamplerError: the sampler failed.
            GroupsRejected: the recipe rejected the groups of `rejected_steps` outer steps in a row.
            Exception: the error of `Recipe.rejects`.
        """
        while True:
            self._abort_stale()
            while self._error is None and self._shared.room() and self._start_next():
                pass
            if self._error is not None:
                raise self._error
            await self._shared.change()

    async def finish(self, limit_s: float) -> None:
        """Wait up to `limit_s` seconds until the groups that are being generated are complete; no
        further groups start.
        """
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=limit_s)

    async def stop(self) -> None:
        """Cancel all groups that are being generated, and roll them back in the buffer; the next
        `run` starts them again.
        """
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        # Including the group whose error ended the run.
        self._error = None
        self._rejected = 0
        for group_id in self._shared.buffer.generating_ids:
            self._shared.buffer.rollback(group_id)

    def _abort_stale(self) -> None:
        """Evict the generating groups that the sampler finds too stale, and cancel their
        requests.
        """
        shared = self._shared
        ready, version = shared.buffer.ready, shared.trainer_version
        stale = chosen(shared.sampler, "abort", ready, version=version)
        for group in stale:
            # Dropped before the cancel, so that the ending task cannot commit it.
            shared.buffer.drop(group.id, "evicted")
            if (task := self._tasks.get(group.id)) is not None:
                task.cancel()
        if stale:
            shared.tell()

    def _start_next(self) -> bool:
        shared = self._shared
        owed = shared.buffer.next_owed
        group_id = shared.next_prompt if owed is None else owed
        prompt = shared.prompts.prompt(group_id)
        if prompt is None:
            shared.exhausted = True
            shared.tell()
            return False
        shared.buffer.reserve(group_id, version=shared.rollout_version)
        if owed is None:
            shared.next_prompt += 1
        shared.count_generating()
        self._tasks[group_id] = task = asyncio.ensure_future(self._fill(group_id, prompt))
        task.add_done_callback(lambda ended: self._ended(group_id, ended))
        return True

    def _ended(self, group_id: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(group_id, None)
        self._shared.count_generating()
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
        self._shared.tell()

    async def _fill(self, group_id: int, prompt: Any) -> None:
        """Generate one reserved group, store it, and make it ready in the buffer. A group that
        fails or that the recipe rejects is dropped.
        """
        shared = self._shared
        started = shared.measure.now()
        # On the timeline, groups that are generated at the same time have separate tracks.
        track = next(track for track in itertools.count(1) if track not in self._tracks)
        self._tracks.add(track)
        try:
            group = await self._generate(group_id, prompt)
        finally:
            self._tracks.discard(track)
        if group is None or self._aborted(group_id):
            return
        shared.measure.span(
            f"rollouts {track}", f"group {group_id}", started, {"version": group.oldest_version}
        )
        # Its tokens may be newer than the weights at its start.
        shared.buffer.renew(group_id, version=group.oldest_version)
        if reason := shared.recipe.rejects(group):
            self._reject(group, reason)
            return
        self._rejected = 0
        try:
            await self._stored.put(group)
        except asyncio.CancelledError:
            self._stored.owe(group_id)  # the put may have succeeded
            raise
        except Exception as error:  # noqa: BLE001 (any error of a data plane drops the group)
            self._drop(group_id, "not stored", error)
            # One of the attempts may have succeeded.
            await self._stored.clear([group_id])
            return
        if self._aborted(group_id):
            self._stored.owe(group_id)
            return
        shared.buffer.commit(group_id, version=group.oldest_version)
        shared.tell()
        shared.measure.count("ready groups", len(shared.buffer.ready))

    async def _generate(self, group_id: int, prompt: Any) -> RolloutGroup | None:
        """Generate a group in up to `group_attempts` attempts, and return the group; None if the
        group was dropped or aborted.
        """
        settings = self._shared.settings
        attempt = 0
        while True:
            try:
                return await asyncio.wait_for(
                    self._shared.generator.generate(group_id, prompt, attempt=attempt),
                    settings.group_timeout_s,
                )
            except EnginesLost:
                # The prompt is fine: wait for engines, until the watchdog ends the run.
                await self._shared.change()
            except PoisonedPrompt as error:
                self._drop(group_id, "poisoned", error)
                return None
            except Exception as error:  # noqa: BLE001 (any error of an engine or a verifier)
                if self._aborted(group_id):
                    return None
                attempt += 1
                self._shared.retries["rollout"] += 1
                if attempt >= settings.group_attempts:
                    self._drop(group_id, "failed", error)
                    return None
                _log.warning("group %d, attempt %d: %r", group_id, attempt, error)
                await asyncio.sleep(settings.retry_wait_s * 2 ** (attempt - 1))
            if self._aborted(group_id):
                return None
            self._shared.buffer.renew(group_id, version=self._shared.rollout_version)

    def _aborted(self, group_id: int) -> bool:
        """Return True if the buffer no longer has the group, i.e. the group was aborted while it
        was generated; its task must then end.

        A cancellation can get lost if the engine responds at the same moment.
        """
        return not self._shared.buffer.holds(group_id)

    def _reject(self, group: RolloutGroup, reason: str) -> None:
        """Drop a group that the recipe rejects. Raise `GroupsRejected` once the number of groups
        rejected in a row is that of the groups that train in `rejected_steps` outer steps.
        """
        settings = self._shared.settings
        _log.debug("group %d is rejected: %s", group.id, reason)
        self._shared.buffer.drop(group.id, "filtered")
        self._shared.tell()
        self._rejected += 1
        rewards = ", ".join(f"{reward:g}" for reward in group.rewards[:8])
        self._last_rejected.append(f"{rewards} (group {group.id})")
        if self._rejected == settings.rejected_steps * settings.target_groups:
            raise GroupsRejected(
                f"the recipe rejected {self._rejected} groups in a row, as many as train in "
                f"rejected_steps = {settings.rejected_steps} outer steps; the last one: {reason}; "
                f"the last rewards: {'; '.join(self._last_rejected)}; correct the reward, or raise "
                "rejected_steps"
            )

    def _drop(self, group_id: int, reason: str, error: BaseException) -> None:
        if self._aborted(group_id):
            return
        # Not a reward of zero: that would teach the policy to avoid prompts on which engines fail.
        _log.error("group %d is dropped, %s: %r", group_id, reason, error)
        self._shared.buffer.drop(group_id, "filtered")
        self._shared.dropped[reason] += 1
        self._shared.dropped_for = repr(error)
        self._shared.tell()
