"""Steps that are stopped at some call, aborted and made again, beside a run that never was.

Runs on a rank.
"""

from __future__ import annotations

import collections
import datetime
from typing import Any

import call_sites
import torch.distributed as dist
from scenario import ROWS, Bench, TokenLoss, cut, data

from megatron_idempotent.window.agreement import SessionPoisoned, WindowAborted, is_poisoned

PIECES = [1, 2]


class Steps:
    """A model with dropout, whose steps can be run call by call."""

    def __init__(
        self,
        engine: str,
        last: bool,
        *,
        undo: bool = True,
        deadline_s: float = 10.0,
        **options: Any,
    ) -> None:
        self.bench = Bench(engine, step={"undo": undo, "deadline_s": deadline_s}, **options)
        self.step = self.bench.step
        self.digest = self.bench.digest
        self._last = last
        self.name: str | None = None
        # Nothing that is stopped uses it.
        self._aside = dist.new_group(timeout=datetime.timedelta(seconds=60))

    def require_alike(self, poisoned: bool, raised: BaseException | None) -> None:
        """All ranks come here, and to the same."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, poisoned, group=self._aside)
        if len(set(found)) != 1:
            raise AssertionError(f"poisoned, by rank: {found}") from raised

    def calls(self, number: int):
        """The calls of one step, to be made one after the other."""
        rows = data(number, ROWS * sum(PIECES), self.bench.replica)
        first, second = cut(rows, PIECES)
        name = self.name = self.step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
        yield lambda: self.step.microbatch(name, first)
        yield lambda: self.step.microbatch(name, second, last=self._last)
        yield lambda: self.step.finish(name)

    def whole(self, number: int) -> None:
        """One step."""
        for call in self.calls(number):
            call()


def stopped(
    engine: str,
    options: dict[str, Any],
    last: bool,
    which: int,
    kind: str,
    sample: slice | int,
    only_rank: int | None = None,
    skip: int = 0,
) -> tuple[dict[str, int], str, int | None]:
    """One step per site of call `which`: stopped there, aborted and made again.

    On all ranks alike, at the sites that all of them have, or on `only_rank`; at a slice of them,
    or at so many, one in the middle of each of as many parts. Returns how often each outcome was
    seen, the first site after which a step is not the one of a run in which nothing was ever
    stopped, and how many sites are done if this process cannot do the rest.
    """
    clean = Steps(engine, last, **{**options, "deadline_s": 20.0})
    clean.whole(0)
    clean.whole(1)
    found: set[Any] = set()
    for index, call in enumerate(clean.calls(2)):
        if index == which:
            found = call_sites.sites(call)
        else:
            call()
    want = {2: clean.digest()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, sorted(found))
    here = everywhere if only_rank is None else [everywhere[only_rank]]
    sites = sorted(set.intersection(*map(set, here)))
    if isinstance(sample, int):
        sites = [sites[(2 * n + 1) * len(sites) // (2 * sample)] for n in range(sample)]
    else:
        sites = sites[sample]
    # Each step costs a clean one, which is in vain behind a session that cannot be rebuilt.
    done = min(len(sites), skip + 4) if clean.bench.rebuild is None else len(sites)
    for number in range(3, done - skip + 2):
        clean.whole(number)
        want[number] = clean.digest()

    steps = Steps(engine, last, **options)
    steps.whole(0)
    steps.whole(1)
    mine = only_rank in (None, dist.get_rank())
    outcomes: collections.Counter[str] = collections.Counter()
    for number, site in enumerate(sites[skip:done], start=2):
        at = site if mine else None
        try:
            outcome = _once(steps, number, which, at, getattr(call_sites, kind))
        except BaseException as error:
            error.add_note(f"stopped at {site}")
            raise
        outcomes[outcome] += 1
        if is_poisoned():
            done = skip + number - 1
            break
        if steps.digest() != want[number]:
            return dict(outcomes), f"{site}: {dict(outcomes)}", None
    return dict(outcomes), "", done if done < len(sites) else None


def _once(steps: Steps, number: int, which: int, at: Any, kind: Any) -> str:
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
            steps.step.abort(steps.name)
        except SessionPoisoned:
            outcome = "SessionPoisoned"
        except RuntimeError as committed:
            if "finish() it again" not in str(committed):
                raise
            outcome = "committed"
        steps.require_alike(is_poisoned(), raised)
        if outcome == "committed":
            call()
            return outcome
        if is_poisoned():
            outcome = "SessionPoisoned"
            if steps.bench.rebuild is None:
                return outcome
            steps.bench.rebuild()
        steps.whole(number)
        return outcome
    steps.require_alike(is_poisoned(), raised)
    return "not reached"
