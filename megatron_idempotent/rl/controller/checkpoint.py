"""Evaluates versions, writes and restores checkpoints, and logs a row of metrics per step."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from megatron_idempotent.rl.engines.protocol import RoutedExperts, Sample
from megatron_idempotent.rl.metrics.loggers import Logger, Loggers
from megatron_idempotent.rl.metrics.names import (
    SYNC,
    InflightClock,
    counts_metrics,
    idle_metrics,
    staleness_metrics,
)
from megatron_idempotent.rl.workers.protocol import RanksLost

from .buffer import GroupBuffer
from .protocol import ControllerError, RolloutGroup, StepOutcome, Store
from .state import RunState, StoredGroups

_FORMAT = 1
_log = logging.getLogger(__name__)


async def capture(shared: RunState, stored: StoredGroups) -> dict[str, Any]:
    """Return the controller's state for a checkpoint, as JSON values: the versions, the buffer's
    state, and all complete groups with their samples.

    `put_back` restores the result. Floats round-trip bit for bit. Prompts are not included, because
    a resumed run gets them by their index. A group that the data plane has lost is dropped from the
    buffer.

    Raises:
        Exception: the data plane's error at its last attempt.
    """
    while True:
        # The counts first, without awaiting: more groups complete while the data plane is read.
        state = {
            **_settings(shared),
            "trainer_version": shared.trainer_version,
            "next_prompt": shared.next_prompt,
            "buffer": shared.buffer.state(),
        }
        ready_ids = [fields["id"] for fields in state["buffer"]["ready"]]
        groups_by_id = {group_id: await stored.get(group_id) for group_id in ready_ids}
        groups = [_as_json(group) for group in groups_by_id.values() if group is not None]
        if len(groups) == len(ready_ids):
            return {**state, "groups": groups}
        for group_id, group in groups_by_id.items():
            if group is None:
                shared.lose(group_id)


async def put_back(shared: RunState, stored: StoredGroups, state: Mapping[str, Any]) -> None:
    """Restore a run from the state that `capture` returned. Raise `ControllerError` if the
    checkpoint was written with other settings.

    Sets the trainer's version, the index of the next prompt, and the buffer, and puts the complete
    rollout groups into the data plane, which stores them. The engines' weights do not change.

    Raises:
        ControllerError: the state has another sampler, step size or format.
        Exception: the data plane's error at its last attempt.
    """
    for name, current in _settings(shared).items():
        if state.get(name) != current:
            raise ControllerError(
                f"the checkpoint was written with {name} = {state.get(name)!r}, now it is "
                f"{current!r}; resume with the same settings, or start a new run"
            )
    buffer = GroupBuffer.restored(state["buffer"], shared.buffer.capacity)
    for fields in state["groups"]:
        samples = []
        for sample in fields["samples"]:
            lists = {name: tuple(sample[name]) for name in ("tokens", "logprobs", "versions")}
            routes = sample.get("routed_experts")
            if routes is not None:
                routes = RoutedExperts(**{**routes, "data": base64.b64decode(routes["data"])})
            samples.append(Sample(**{**sample, **lists, "routed_experts": routes}))
        prompt = shared.prompts.prompt(fields["id"])
        group = {**fields, "samples": tuple(samples), "rewards": tuple(fields["rewards"])}
        await stored.put(RolloutGroup(prompt=prompt, **group))
    shared.buffer = buffer
    shared.trainer_version = state["trainer_version"]
    shared.next_prompt = state["next_prompt"]


def _settings(shared: RunState) -> dict[str, Any]:
    """Return the settings that a checkpoint records, and that must be the same in a resumed run."""
    return {
        "format": _FORMAT,
        "sampler": shared.sampler.name,
        "max_staleness": shared.sampler.max_staleness,
        "groups_per_step": shared.settings.groups_per_step,
    }


def _as_json(group: RolloutGroup) -> dict[str, Any]:
    samples = [dataclasses.asdict(sample) for sample in group.samples]
    for fields in samples:
        if fields["routed_experts"] is not None:
            data = fields["routed_experts"]["data"]
            fields["routed_experts"]["data"] = base64.b64encode(data).decode("ascii")
    return {
        "id": group.id,
        "samples": samples,
        "rewards": list(group.rewards),
        "failed": group.failed,
    }


class Reporting:
    """Makes a row of metrics for each optimizer step, and passes the row to the loggers.

    Example: `reporting.step(groups, outcome, {"evaluation/reward": 0.5})`.
    """

    def __init__(self, shared: RunState, loggers: Sequence[Logger] | Loggers) -> None:
        self._shared = shared
        self._given: Sequence[Logger] = () if isinstance(loggers, Loggers) else loggers
        self._loggers = loggers if isinstance(loggers, Loggers) else Loggers([])
        self._since: float | None = None
        self._row: tuple[dict[str, float], int] | None = None

    def open(self) -> None:
        """Start the thread that calls the loggers, so that they do not block the event loop."""
        if self._given:
            self._loggers = Loggers(self._given, threaded=True, lent=True)

    async def flush(self) -> None:
        """Wait until the loggers have all rows of metrics so far, or until a time limit is over."""
        await asyncio.to_thread(self._loggers.flush)

    async def close(self) -> None:
        """Wait until the loggers have all rows of metrics, and end the thread that calls them. The
        loggers stay open.
        """
        if self._given:
            await asyncio.to_thread(self._loggers.close)
            self._given = self._loggers.working

    def step(
        self, groups: Sequence[RolloutGroup], outcome: StepOutcome, extra: Mapping[str, float]
    ) -> None:
        """Make the row of metrics for the optimizer step that has just ended, and keep the row for
        `release`, which logs it. The row's version is `trainer_version`.

        `extra` are further metrics under their full names, such as `evaluation/reward`.
        """
        shared = self._shared
        version = shared.trainer_version
        now_s = shared.measure.now()
        total_s = now_s - self._since if self._since is not None else 0.0
        self._since = now_s
        phases = shared.measure.take()
        generation = shared.inflight.take(now_s) if shared.inflight is not None else None
        learnt = {**shared.recipe.metrics(groups, version - 1), **outcome.metrics}
        lags = [version - 1 - group.oldest_version for group in groups]
        self._row = (
            {
                **{f"train/{name}": value for name, value in learnt.items()},
                "train/response_tokens": float(outcome.tokens),
                "train/optimizer_steps": float(outcome.updated),
                **staleness_metrics(lags),
                **{f"timing/train/{name}_s": seconds for name, seconds in phases.items()},
                "timing/train/total_s": total_s,
                "timing/train/tokens_per_s": outcome.tokens / total_s if total_s else 0.0,
                **idle_metrics(phases, total_s, generation=generation),
                **counts_metrics(shared.buffer.counts.by_name(), shared.dropped, shared.retries),
                **extra,
            },
            version,
        )
        for name, value in (("lag", max(lags, default=0)), ("trainer version", version)):
            shared.measure.count(name, value)

    def release(self) -> None:
        """Pass the row that `step` has kept to the loggers. If the row's version is the last one
        that was published, first add the metrics of its publish. Without a row: no-op.
        """
        if self._row is None:
            return
        (row, version), self._row = self._row, None
        if version == self._shared.published:
            row |= {f"{SYNC}{name}": value for name, value in self._shared.sync_metrics.items()}
        self._loggers.log(row, step=version)

    def begin(self, metrics: Mapping[str, float] | None = None) -> None:
        """Reset the sums of times and group counts, so that the next row of metrics covers the time
        from now on. Log `metrics`, if any, as the row of version 0.
        """
        shared = self._shared
        if metrics:
            self._loggers.log(metrics, step=0)
        self._since = now_s = shared.measure.now()
        shared.measure.take()
        shared.inflight = InflightClock(now_s)
        shared.count_generating()


Evaluate = Callable[[int], Awaitable[Mapping[str, float]]]
"""Evaluates a version; returns its metrics under full names, or an empty mapping.

It is called with 0 before training, and with each published version before the first group is
started with it. If it raises, the version's row has `evaluation/failed` and the run continues."""


class Checkpoints:
    """Evaluates versions of the weights, writes checkpoints (`capture`, then `save`), and
    restores the newest checkpoint.

    Example: `metrics = await checkpoints.before_release(version)`, later `await
    checkpoints.save()`.
    """

    def __init__(
        self,
        shared: RunState,
        stored: StoredGroups,
        reporting: Reporting,
        store: Store | None,
        evaluate: Evaluate | None,
    ) -> None:
        self._shared, self._stored, self._reporting = shared, stored, reporting
        self.store, self._evaluate = store, evaluate
        self.until = 0
        """The run's last version, which gets a checkpoint if any version does."""
        self.unrestored = False
        """True if ranks are lost or a restore failed: `restore` must succeed before anything
        else."""
        self._captured: Mapping[str, Any] | None = None

    def work_at(self, version: int) -> bool:
        """Return True if a checkpoint, or an evaluation of the weights, is due at this version."""
        evaluated = getattr(self._evaluate, "due", lambda _: self._evaluate is not None)
        return self._due(version) or bool(evaluated(version))

    async def before_release(self, version: int) -> Mapping[str, float]:
        """Evaluate the weights of a published version before any group starts with them, and return
        the metrics; for version 0, log the metrics and return {}. If a later version gets a
        checkpoint, also keep the controller's state for `save`.

        Raises:
            RanksLost: policy ranks are gone.
            Exception: the data plane's error at its last attempt.
        """
        shared = self._shared
        metrics: Mapping[str, float] = {}
        if self._evaluate is not None:
            with shared.measure.phase("evaluation", version=version):
                shared.doing = "evaluation"
                try:
                    metrics = await self._evaluate(version)
                except RanksLost:
                    raise
                except Exception as error:  # noqa: BLE001 (training does not need evaluations)
                    _log.error("version %d is not evaluated: %r", version, error)
                    metrics = {"evaluation/failed": 1.0}
                finally:
                    shared.progressed()
        if version == 0:
            self._reporting.begin(metrics)
            return {}
        if self._due(version):
            await self.capture()
        return metrics

    def _due(self, version: int) -> bool:
        settings = self._shared.settings
        outer, every = version // settings.minibatches, settings.checkpoint_every
        if self.store is None or not every or not outer:
            return False
        return outer % every == 0 or version >= self.until

    @property
    def due_early(self) -> bool:
        """True if a run that ends before version `until` must still write a checkpoint: because it
        is drained, or because prompts have run out and `checkpoint_every` is not 0.
        """
        shared = self._shared
        out_of_prompts = shared.exhausted and shared.trainer_version < self.until
        return shared.draining or bool(out_of_prompts and shared.settings.checkpoint_every)

    async def capture(self) -> None:
        """Read the controller's current state, and keep it in memory for `save`."""
        self._captured = await capture(self._shared, self._stored)

    async def save(self) -> None:
        """Write a checkpoint of the policy and the state that `capture` kept; without a state or a
        store: no-op.

        The policy's weights must still be those of the captured version.
        """
        state, self._captured = self._captured, None
        if state is None or self.store is None:
            return
        with self._shared.measure.phase("checkpoint", version=state["trainer_version"]):
            self._shared.doing = "checkpoint"
            # A run that resumes from this checkpoint does not log the rows so far again.
            await self._reporting.flush()
            await self.store.save(state["trainer_version"], state)
            self._shared.progressed()

    async def restore(self, *, starting: bool = False) -> None:
        """Restore the policy's ranks, the buffer and the prompt index from the newest checkpoint.
        Without a checkpoint, reset them to the run's beginning.

        With `starting`, nothing was lost, and it does not count as a retry. After an error,
        `unrestored` stays true.

        Raises:
            ControllerError: the checkpoint has other settings.
            Exception: the store's error, such as `RanksLost`.
        """
        assert self.store is not None, "restore() needs a store"
        shared = self._shared
        self.unrestored = True
        with shared.measure.phase("restore"):
            shared.doing = "restore"
            self._captured = None
            state = await self.store.restore()
            await self._stored.clear([group.id for group in shared.buffer.ready])
            shared.forget()
            if state is not None:
                await put_back(shared, self._stored, state)
            if not starting:
                shared.retries["restore"] += 1
            self._reporting.begin()
            shared.progressed()
        self.unrestored = False
