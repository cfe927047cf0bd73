"""A policy worker that fails once in its run, in the way and at the place that a file says."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path

from megatron_idempotent.trainer.stream.worker import PolicyWorker

#: Removed by the rank that fails, so that it is only once, also over a restart of all ranks.
PLAN = "fault.txt"


def make_worker(job):
    return FaultyWorker(job)


class FaultyWorker(PolicyWorker):
    """The plan is `METHOD NUMBER KIND`: in that call of the method, on rank 1."""

    def __init__(self, job):
        super().__init__(job)
        self._plan = Path(job.out) / PLAN
        self._calls = {}
        self._bad_batch = False

    def _maybe_fail(self, method):
        number = self._calls[method] = self._calls.get(method, -1) + 1
        if os.environ["RANK"] != "1" or not self._plan.exists():
            return
        wanted, at, kind = self._plan.read_text().split()
        if (wanted, int(at)) != (method, number):
            return
        self._plan.unlink()
        if kind == "raise-inside":
            self._bad_batch = True
        if kind == "raise":
            raise RuntimeError(f"{method} fails on rank 1")
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "die-inside":  # of the collective that the others wait in
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(60)
        if kind == "hang":
            time.sleep(60)

    def microbatch(self, step_id, microbatch_id, last, batch):
        self._maybe_fail("microbatch")
        if self._bad_batch:  # the embedding of Megatron's model raises
            self._bad_batch = False
            batch = dataclasses.replace(batch, tokens_BT=batch.tokens_BT + 10**6)
        super().microbatch(step_id, microbatch_id, last, batch)

    def finish(self, *args):
        self._maybe_fail("finish")
        return super().finish(*args)

    def logprobs(self, *args):
        self._maybe_fail("logprobs")
        return super().logprobs(*args)

    def export_next(self):
        self._maybe_fail("export_next")
        return super().export_next()

    def save(self, *args):
        self._maybe_fail("save")
        return super().save(*args)
