"""A policy worker that fails in the ways and at the places that a file says, one after another."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path

from megatron_idempotent.rl.trainer.async_ranks import PolicyWorker

#: The rank that fails takes its line away: it fails once, over a restart of all ranks too.
PLAN = "fault.txt"


class FaultyWorker(PolicyWorker):
    """A line is `METHOD NUMBER KIND`: in that call of this process, or the next one, on rank 1."""

    def __init__(self, job):
        super().__init__(job)
        self._plan = Path(job.out) / PLAN
        self._calls = {}
        self._bad_batch = False

    def _maybe_fail(self, method):
        number = self._calls[method] = self._calls.get(method, -1) + 1
        if os.environ["RANK"] != "1" or not self._plan.exists():
            return
        first, *others = self._plan.read_text().splitlines()
        wanted, at, kind = first.split()
        if wanted != method or number < int(at):
            return
        if others:
            self._plan.write_text("\n".join(others))
        else:
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
        if kind.startswith("terminate-"):  # the controller, which this worker is not the child of
            os.kill(int(kind.removeprefix("terminate-")), signal.SIGTERM)

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
