"""Run each hazard's reproduction on CPU ranks against the installed Megatron, stock and patched.

A hazard is proven where stock Megatron fails with the error that its case file names, and the same
code runs with the patches applied.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .cpu import PROGRAM_PRELOAD, RankError, RankPool, RankTimeout
from .engine.catalogue import patches
from .engine.control import apply
from .engine.record import Patch
from .engine.report import COVERED
from .engine.settings import check_ids

Verdict = Literal["proven", "not_applicable", "stock_runs", "other_error", "not_repaired"]

DEADLINE_S = 120.0
"""For one reproduction on one set of ranks. They take about a second; a hang is an outcome."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one hazard's reproduction did.

    Example:
        Finding(id="train-interval-timer", verdict="proven", seconds=1.4,
                stock="AssertionError: timer has already been started", patched="ok")
    """

    id: str
    verdict: Verdict
    """`proven`; `not_applicable` (what is installed lacks the code, or is out of range); and three
    failures: stock ran without error, stock failed otherwise than the case file says, patched
    failed too."""
    stock: str
    """`ok` or `Type: message` of the first rank that failed."""
    patched: str
    seconds: float
    """Of both runs."""

    @property
    def failed(self) -> bool:
        """Whether case file and release disagree."""
        return self.verdict not in ("proven", "not_applicable")


def prove(ids: Iterable[str] | None = None, *, pool: RankPool | None = None) -> Iterator[Finding]:
    """Yield a finding per hazard, in order of id.

    Args:
        ids: which hazards; None for all.
        pool: ranks to run on; None starts a pool and ends it again.

    Raises:
        UnknownPatchError: an id that no case file has.
    """
    chosen = patches() if ids is None else check_ids(ids, "prove", patches())
    decided = apply(dry_run=True)
    wanted = [patch for patch in patches().values() if patch.id in chosen]
    affected = [patch for patch in wanted if decided[patch.id].status in COVERED]
    own = None
    if pool is None and affected:
        ranks = max(patch.reproduction.ranks for patch in affected)
        pool = own = RankPool(ranks, preload=PROGRAM_PRELOAD)
    try:
        if own is not None:
            own.run(1, _ready, distributed=False)  # or the first hazard would pay for the imports
        for patch in wanted:
            if pool is None or patch not in affected:
                row = decided[patch.id]
                why = f"{row.status}: {row.reason}"
                yield Finding(
                    id=patch.id, verdict="not_applicable", stock=why, patched="-", seconds=0.0
                )
            else:
                yield _examine(patch, pool)
    finally:
        if own is not None:
            own.close()


def outcome(run: Callable[..., list[Any]], patch_id: str, *, applied: Iterable[str]) -> str:
    """Run one reproduction with the patches `applied` and no others: `ok` or `Type: message`.

    Args:
        run: `RankPool.run`, or the pytest fixture `megatron_ranks`.
    """
    ranks = patches()[patch_id].reproduction.ranks
    try:
        run(ranks, _reproduce, patch_id, tuple(applied), timeout_s=DEADLINE_S)
    except RankError as error:
        return f"{error.exception_type}: {error.message}".strip()
    except RankTimeout as error:
        return f"RankTimeout: no end within {error.timeout_s:g} s"
    return "ok"


def _examine(patch: Patch, pool: RankPool) -> Finding:
    started = time.perf_counter()
    stock = outcome(pool.run, patch.id, applied=())
    patched = outcome(pool.run, patch.id, applied=patches())
    verdict: Verdict = "proven"
    if stock == "ok":
        verdict = "stock_runs"
    elif not re.search(patch.reproduction.stock_error, stock):
        verdict = "other_error"
    elif patched != "ok":
        verdict = "not_repaired"
    return Finding(
        id=patch.id,
        verdict=verdict,
        stock=stock,
        patched=patched,
        seconds=time.perf_counter() - started,
    )


def _ready() -> None:
    """On a rank: nothing; the pool has imported torch and Megatron by then."""


def _reproduce(patch_id: str, applied: tuple[str, ...]) -> None:
    # What upstream logs on every rank would bury the table of findings.
    logging.disable(logging.WARNING)
    # Ranks are forked afresh for every run, so nothing has to be reverted.
    apply(exclude=set(patches()) - set(applied))
    patches()[patch_id].reproduction.run()
