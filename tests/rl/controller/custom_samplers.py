"""Samplers of a user's own, some of them wrong."""

from megatron_idempotent.rl.controller.samplers import FirstReadySampler


class NewestIds:
    """Takes the newest prompts first. Inherits nothing."""

    name = "newest_ids"
    max_staleness = None
    drains = False

    def __init__(self, places=3, *, shift=0):
        self.places, self.shift = places, shift

    def required_capacity(self, groups_per_step):
        return groups_per_step

    def room(self, admission):
        return self.places

    def select(self, ready, *, version, count):
        return sorted(ready, key=lambda held: -held.id)[:count]

    def evict(self, ready, *, version):
        return ()


class Half:
    """Only begun."""

    name = "half"
    max_staleness = None
    room = 3

    def select(self, ready, *, version, count):
        return ()


def changed(**parts):
    return type("Changed", (NewestIds,), parts)


NoName = changed(name="")
BelowZero = changed(max_staleness=-1)
Perhaps = changed(drains="no")


class Answers(FirstReadySampler):
    """Says what it is told to say."""

    name = "answers"

    def __init__(self, answer):
        self.answer = answer

    def select(self, ready, *, version, count):
        return self.answer

    def evict(self, ready, *, version):
        return self.answer

    def abort(self, ready, *, version):
        return self.answer


not_a_class = 3
