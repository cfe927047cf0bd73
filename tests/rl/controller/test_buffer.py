"""The buffer against a naive model, and what every mistake is told."""

import json

import pytest
from buffer_strategies import filled, group_ids, versions
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from megatron_idempotent.rl.controller.buffer import GroupBuffer, GroupStateError
from megatron_idempotent.rl.controller.protocol import Counts, Generating, Held

id_lists = st.lists(group_ids, max_size=4)


class BufferMachine(RuleBasedStateMachine):
    """Any operation on any ids: it does what the model does, or raises where the model says no."""

    @initialize(capacity=st.integers(1, 8))
    def begin(self, capacity):
        self.buffer = GroupBuffer(capacity)
        self.capacity = capacity
        self.generating, self.ready, self.leased, self.owed = {}, {}, {}, set()
        self.gone = {"trained": 0, "filtered": 0, "evicted": 0, "aborted": 0}
        self.submitted = self.arrivals = self.starts = 0

    def free(self):
        return max(self.capacity - len(self.generating) - len(self.ready), 0)

    def held(self):
        return set(self.generating) | set(self.ready) | set(self.leased)

    def attempt(self, allowed, operation, *named):
        """Run it; whether it was allowed. One that is not names a group that it is about."""
        before = self.buffer.state(), self.buffer.counts
        if allowed:
            operation()
            return True
        with pytest.raises(GroupStateError) as caught:
            operation()
        assert any(f"group {each} " in f"{caught.value} ".replace(":", " ") for each in named)
        assert (self.buffer.state(), self.buffer.counts) == before
        return False

    @rule(group_id=group_ids, version=versions)
    def reserve(self, group_id, version):
        allowed = group_id not in self.held() and self.free() > 0
        operation = lambda: self.buffer.reserve(group_id, version=version)  # noqa: E731
        if self.attempt(allowed, operation, group_id):
            self.generating[group_id] = (self.starts, version)
            self.owed.discard(group_id)
            self.submitted += 1
            self.starts += 1

    @rule(group_id=group_ids, version=versions)
    def renew(self, group_id, version):
        allowed = group_id in self.generating
        operation = lambda: self.buffer.renew(group_id, version=version)  # noqa: E731
        if self.attempt(allowed, operation, group_id):
            self.generating[group_id] = (self.generating[group_id][0], version)

    @rule(group_id=group_ids, version=versions)
    def commit(self, group_id, version):
        def operation():
            held = self.buffer.commit(group_id, version=version)
            assert held == Held(id=group_id, arrival=self.arrivals, version=version)

        if self.attempt(group_id in self.generating, operation, group_id):
            del self.generating[group_id]
            self.ready[group_id] = (self.arrivals, version)
            self.arrivals += 1

    @rule(group_id=group_ids)
    def rollback(self, group_id):
        allowed = group_id in self.generating
        if self.attempt(allowed, lambda: self.buffer.rollback(group_id), group_id):
            del self.generating[group_id]
            self.owed.add(group_id)
            self.submitted -= 1

    @rule(group_id=group_ids, outcome=st.sampled_from(["filtered", "evicted"]))
    def drop(self, group_id, outcome):
        allowed = group_id in self.generating or group_id in self.ready
        if self.attempt(allowed, lambda: self.buffer.drop(group_id, outcome), group_id):
            running = self.generating.pop(group_id, None) is not None
            self.ready.pop(group_id, None)
            self.gone[outcome] += 1
            self.gone["aborted"] += running and outcome == "evicted"

    def move(self, ids, where, operation):
        allowed = len(set(ids)) == len(ids) and all(each in where for each in ids)
        if self.attempt(allowed, lambda: operation(ids), *ids):
            return {each: where.pop(each) for each in ids}
        return {}

    @rule(ids=id_lists)
    def lease(self, ids):
        self.leased |= self.move(ids, self.ready, self.buffer.lease)

    @rule(ids=id_lists)
    def give_back(self, ids):
        self.ready |= self.move(ids, self.leased, self.buffer.give_back)

    @rule(ids=id_lists)
    def trained(self, ids):
        self.gone["trained"] += len(self.move(ids, self.leased, self.buffer.trained))

    @rule(data=st.data())
    def lease_some_that_are_ready(self, data):
        if self.ready:
            self.lease(data.draw(st.lists(st.sampled_from(sorted(self.ready)), unique=True)))

    @rule()
    def train_all_that_are_leased(self):
        self.trained(list(self.leased))

    @rule()
    def write_a_checkpoint_and_resume(self):
        state = json.loads(json.dumps(self.buffer.state()))
        self.buffer = GroupBuffer.restored(state, self.capacity)
        self.submitted -= len(self.generating)
        self.owed |= set(self.generating)
        self.generating = {}
        self.starts = 0
        self.ready |= self.leased
        self.leased = {}

    @invariant()
    def the_buffer_is_as_the_model_says(self):
        buffer = self.buffer
        assert buffer.counts == Counts(
            submitted=self.submitted,
            generating=len(self.generating),
            ready=len(self.ready),
            leased=len(self.leased),
            **self.gone,
        )
        assert buffer.counts.conserved
        assert buffer.accepted == self.gone["trained"] + len(self.ready) + len(self.leased)
        assert buffer.free == self.free()
        assert buffer.generating_ids == sorted(self.generating)
        assert buffer.unfinished_ids == sorted(set(self.generating) | self.owed)
        assert buffer.next_owed == min(self.owed - set(self.generating), default=None)
        assert all(buffer.holds(each) == (each in self.held()) for each in range(12))

    @invariant()
    def ready_groups_are_in_their_orders(self):
        ready = self.buffer.ready
        groups = [Held(id=i, arrival=a, version=v) for i, (a, v) in self.ready.items()]
        assert len(ready) == len(groups)
        assert list(ready) == sorted(groups, key=lambda held: held.arrival)
        assert ready.lowest_unfinished == min(set(self.generating) | self.owed, default=None)
        assert all(held in ready for held in groups)
        assert all(
            Held(id=i, arrival=a, version=v) not in ready for i, (a, v) in self.leased.items()
        )

    @invariant()
    def groups_that_are_being_generated_are_in_their_orders(self):
        running = [Generating(id=i, started=s, version=v) for i, (s, v) in self.generating.items()]
        by_start = sorted(running, key=lambda group: group.started)
        assert list(self.buffer.ready.generating()) == by_start
        assert all(group in self.buffer.ready for group in running)


BufferMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestBufferAgainstAModel = BufferMachine.TestCase


def test_a_group_goes_its_whole_way_and_leaves_nothing_behind():
    buffer = GroupBuffer(1)
    for group_id in range(1000):
        buffer.reserve(group_id)
        buffer.commit(group_id, version=group_id)
        buffer.lease([group_id])
        buffer.trained([group_id])
    kept = [value for value in vars(buffer).values() if isinstance(value, (dict, list, set))]
    assert sorted(map(len, kept)) == [0, 0, 0, 0, 4], "only the numbers of what has left"
    assert len(json.dumps(buffer.state())) < 200
    assert buffer.counts.trained == 1000


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda b: b.reserve(1), "group 1 is generating already"),
        (
            lambda b: b.reserve(9),
            "no place for group 9: 2 groups are generating or ready, and capacity is 2",
        ),
        (lambda b: b.commit(2, version=0), "group 2 is ready, and has to be generating to commit"),
        (lambda b: b.commit(9, version=0), r"group 9 is not in the buffer \(not reserved, or gone"),
        (lambda b: b.drop(3, "evicted"), "group 3 is leased, .* generating or ready"),
        (lambda b: b.lease([2, 2]), r"group 2 \(ready\) is named twice"),
        (lambda b: b.trained([3, 2]), "group 2 is ready, and has to be leased to count it"),
        (lambda b: b.drop(2, "trained"), "outcome is 'trained'; allowed: filtered, evicted"),
    ],
)
def test_a_mistake_names_the_group_and_its_state_and_changes_nothing(operation, message):
    buffer = GroupBuffer(2)
    for group_id in (2, 3):
        buffer.reserve(group_id)
        buffer.commit(group_id, version=0)
    buffer.lease([3])
    buffer.reserve(1)  # in the place that the lease has freed
    before = buffer.state(), buffer.counts
    with pytest.raises((GroupStateError, ValueError), match=message):
        operation(buffer)
    assert (buffer.state(), buffer.counts) == before


@pytest.mark.parametrize("capacity", [0, -1, 2.0, True])
def test_only_a_capacity_of_whole_groups_is_taken(capacity):
    with pytest.raises(ValueError, match=f"capacity is {capacity}; allowed"):
        GroupBuffer(capacity)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": {"trained": 1}}, "KeyError: 'filtered'"),
        ({"counts": None}, "TypeError"),
        ({"unfinished": [4, 1]}, r"its unfinished is \[4, 1\], and would be \[1, 4\]"),
        ({"unfinished": [1, 1]}, r"its unfinished is \[1, 1\], and would be \[1\]"),
        ({"ready": [{"id": 2}]}, "TypeError"),
        ({"ready": [{"id": i, "arrival": i, "version": 0} for i in (7, 6)]}, "its ready is"),
        ({"ready": [{"id": 2, "arrival": i, "version": 0} for i in (0, 1)]}, "its ready is"),
    ],
)
def test_a_state_that_no_buffer_has_written_is_an_error(change, message):
    state = {**filled([(2, 0), (1, None), (3, 0), (4, None)]).state(), **change}
    with pytest.raises(ValueError, match=f"no state of a buffer: .*{message}"):
        GroupBuffer.restored(state, 8)
