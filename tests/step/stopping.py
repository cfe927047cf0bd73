"""Steps that are stopped at some call, aborted and made again, beside a run that never was.

Runs on a rank.
"""

from __future__ import annotations

import collections
import hashlib
from typing import Any

import call_sites
import torch
import torch.distributed as dist
from split_bench import ROWS, TokenLoss, build, cut, data, forward, parameters

from megatron_idempotent import TrainStep, rebuild_process_groups
from megatron_idempotent.window.agreement import (
    SessionPoisoned,
    WindowAborted,
    is_poisoned,
)

PIECES = [1, 2]


class Steps:
    """A model with dropout, whose steps can be run call by call."""

    def __init__(
        self, last: bool, *, undo: bool = True, deadline_s: float = 10.0, **options: Any
    ) -> None:
        self.model, self.scheduler, self._replica = build(**options)
        self.step = TrainStep(
            self.model.chunks,
            self.model.optimizer,
            self.scheduler,
            forward=forward,
            deadline_s=deadline_s,
            undo=undo,
        )
        self._last = last

    def calls(self, number: int):
        """The calls of one step, to be made one after the other."""
        first, second = cut(data(number, ROWS * sum(PIECES), self._replica), PIECES)
        name = self.step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
        yield lambda: self.step.microbatch(name, first)
        yield lambda: self.step.microbatch(name, second, last=self._last)
        yield lambda: self.step.finish(name)

    def whole(self, number: int) -> None:
        """One step."""
        for call in self.calls(number):
            call()

    def digest(self) -> str:
        """Of parameters, optimizer state, schedule and random state."""
        chained = getattr(self.model.optimizer, "chained_optimizers", [self.model.optimizer])
        tensors = [
            parameters(self.model),
            torch.get_rng_state(),
            torch.tensor([float(self.scheduler.num_steps)]),
            torch.tensor([float(group["lr"]) for group in self.model.optimizer.param_groups]),
            *(
                value
                for one in chained
                for state in one.optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor)
            ),
        ]
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()


def stopped(
    options: dict[str, Any],
    last: bool,
    which: int,
    kind: str,
    sample: slice,
    only_rank: int | None = None,
) -> tuple[dict[str, int], str]:
    """One step per site of call `which`: stopped there, aborted and made again.

    On all ranks alike, at the sites that all of them have, or on `only_rank`. Returns how often
    each outcome was seen, and the first site behind which a step is not the one of a run in which
    nothing was ever stopped.
    """
    clean = Steps(last, **options)
    clean.whole(0)
    clean.whole(1)
    found: dict[Any, int] = {}
    for index, call in enumerate(clean.calls(2)):
        if index == which:
            found = call_sites.sites(call)
        else:
            call()
    want = {2: clean.digest()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, sorted(found))
    here = everywhere if only_rank is None else [everywhere[only_rank]]
    chosen = sorted(set.intersection(*map(set, here)))[sample]
    for number in range(3, len(chosen) + 2):
        clean.whole(number)
        want[number] = clean.digest()

    steps = Steps(last, **options)
    steps.whole(0)
    steps.whole(1)
    mine = only_rank in (None, dist.get_rank())
    outcomes: collections.Counter[str] = collections.Counter()
    for number, site in enumerate(chosen, start=2):
        at = found[site] if mine else None
        outcomes[_once(steps, number, which, at, getattr(call_sites, kind))] += 1
        if steps.digest() != want[number]:
            return dict(outcomes), f"{site}: {dict(outcomes)}"
    return dict(outcomes), ""


def _once(steps: Steps, number: int, which: int, at: int | None, kind: Any) -> str:
    raised: BaseException | None = None
    for index, call in enumerate(steps.calls(number)):
        if index == which and at is not None:
            raised = call_sites.interrupt(call, at, kind)
        else:
            try:
                call()
            except (WindowAborted, SessionPoisoned) as told:
                raised = told
        if raised is None:
            continue
        outcome = type(raised).__name__
        try:
            steps.step.abort()
        except SessionPoisoned:
            outcome = "SessionPoisoned"
        except RuntimeError as committed:
            if "finish() it again" not in str(committed):
                raise
            call()
            return "committed"
        if is_poisoned():
            outcome = "SessionPoisoned"
            rebuild_process_groups(steps.model.chunks, steps.model.optimizer)
        steps.whole(number)
        return outcome
    return "not reached"
