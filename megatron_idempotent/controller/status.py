"""Makes the answer of `ping`."""

from __future__ import annotations

import dataclasses

from .protocol import Prompts
from .records import Status
from .shared import Shared


def status_of(shared: Shared, prompts: Prompts) -> Status:
    """Returns the state of a run now."""
    counts = shared.buffer.counts
    fields = {each.name: getattr(counts, each.name) for each in dataclasses.fields(counts)}
    running = shared.state in ("running", "draining")
    return Status(
        state=shared.state,
        trainer_version=shared.trainer_version,
        rollout_version=shared.rollout_version,
        train_steps=shared.train_steps,
        outer_steps=shared.trainer_version // shared.settings.minibatches,
        epoch=prompts.epoch(shared.next_prompt),
        inflight_rollouts=counts.generating,
        rollouts_permitted=shared.room() > 0,
        ready_groups=counts.ready,
        step_groups=shared.step_groups,
        doing=shared.doing,
        idle_s=shared.measure.now() - shared.idle_since if running else 0.0,
        counts={**fields, "running": counts.running},
    )
