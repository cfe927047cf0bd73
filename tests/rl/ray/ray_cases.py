"""A worker that tests put into actors, and what they look at in it."""

from __future__ import annotations

import os
import threading


class Surroundings:
    """Tells where it runs."""

    def __init__(self, names) -> None:
        from megatron_idempotent.proof import cpu

        self._told = {name: os.environ.get(name) for name in names}
        self._told["cpu"] = cpu.is_enabled()

    def tell(self):
        return {**self._told, "main": threading.current_thread() is threading.main_thread()}

    def process(self):
        return os.getpid()

    def double(self, array):
        array *= 2
        return array
