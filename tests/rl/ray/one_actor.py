"""Engines that are made one after another in the same actor, which takes seconds to start."""

from __future__ import annotations

from megatron_idempotent.rl.engines.ray import RayEngine
from megatron_idempotent.rl.engines.ray.engine import Remote


class OneActor(Remote):
    """Makes no actor where there is one, and leaves it."""

    actor = None

    def _make_actor(self):
        if OneActor.actor is None:
            OneActor.actor = super()._make_actor()
        return OneActor.actor

    def kill(self, why):
        self._actor, self._why_none = None, why


def engine_in_it(directory, **settings):
    """An engine that is not started."""
    engine = RayEngine("ray_cases:make_slowly", (str(directory), settings), name="remote")
    engine._remote.__class__ = OneActor
    return engine
