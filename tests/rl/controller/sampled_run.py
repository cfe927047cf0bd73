"""A run of a buffer and a sampler without engines, trainer or clock: a seed decides what is next.

It follows the controller's rules: groups start as `room` and the buffer allow; a step leases groups
one by one; after every `minibatches` steps engines get new weights before the next one begins,
and, where the sampler drains, once nothing is generating and nothing more may start.
"""

from __future__ import annotations

import dataclasses
import random

from megatron_idempotent.rl.controller.buffer import GroupBuffer
from megatron_idempotent.rl.controller.protocol import Admission
from megatron_idempotent.rl.controller.samplers import chosen


class Deadlock(AssertionError):
    """Nothing can happen any more."""


@dataclasses.dataclass
class SampledRun:
    """Example: `SampledRun(sampler, groups_per_step=2, capacity=4, seed=0).steps(10)`."""

    sampler: object
    groups_per_step: int
    capacity: int
    seed: int
    minibatches: int = 1
    concurrency: int = 1000
    useless: frozenset[int] = frozenset()
    """Groups that the recipe rejects."""

    def __post_init__(self):
        self.draw = random.Random(self.seed)
        self.buffer = GroupBuffer(self.capacity)
        self.trainer_version = self.rollout_version = self.next_id = 0
        self.started = {}
        self.step = []
        self.due = False
        self.trained = []
        """Groups of each step in the order in which it took them, with their versions."""
        self.worst = 0

    def steps(self, count):
        """Run until so many steps are made; what each of them trained."""
        while len(self.trained) < count:
            every = (self.start, self.finish, self.train, self.publish, self.abort)
            moves = [move for move in every if move(look=True)]
            if not moves:
                raise Deadlock(f"{self.buffer.counts} after {len(self.trained)} steps")
            self.draw.choice(moves)(look=False)
            assert self.buffer.counts.conserved
        return self.trained

    def room(self):
        running = self.buffer.counts.generating
        admission = Admission(
            rollout_version=self.rollout_version,
            trainer_version=self.trainer_version,
            groups_per_step=self.groups_per_step,
            accepted=self.buffer.accepted,
            running=running,
        )
        room = self.sampler.room(admission)
        assert room >= 0
        return min(room, self.buffer.free, self.concurrency - running)

    def start(self, *, look):
        if look:
            return self.room() > 0
        self.buffer.reserve(self.next_id, version=self.rollout_version)
        self.started[self.next_id] = self.rollout_version
        self.next_id += 1

    def finish(self, *, look):
        if look:
            return self.started
        group_id = self.draw.choice(sorted(self.started))
        version = self.started.pop(group_id)
        if group_id in self.useless:
            self.buffer.drop(group_id, "filtered", "no spread")
        else:
            self.buffer.commit(group_id, version=version)

    def abort(self, *, look):
        stale = chosen(self.sampler, "abort", self.buffer.ready, version=self.trainer_version)
        if look:
            return stale
        for group in stale:
            self.buffer.drop(group.id, "evicted", "aborted")
            del self.started[group.id]

    def train(self, *, look):
        """Take a group, or make the update of a step that has all of its groups."""
        if self.due:
            return False
        if len(self.step) == self.groups_per_step:
            return look or self.update()
        version, ready = self.trainer_version, self.buffer.ready
        picked = chosen(self.sampler, "select", ready, version=version, count=1)
        stale = chosen(self.sampler, "evict", ready, version=version)
        assert not set(picked) & set(stale)
        if look:
            return picked or stale
        for held in stale:
            self.buffer.drop(held.id, "evicted", "stale")
        for held in picked:
            self.buffer.lease([held.id])
            self.step.append(held)
            self.worst = max(self.worst, version - held.version)
            assert held.version <= version

    def update(self):
        self.buffer.trained([held.id for held in self.step])
        self.trained.append([(held.id, held.version) for held in self.step])
        self.step = []
        self.trainer_version += 1
        self.due = self.trainer_version % self.minibatches == 0

    def publish(self, *, look):
        if look:
            return self.due and not (self.sampler.drains and (self.started or self.room() > 0))
        self.rollout_version, self.due = self.trainer_version, False
