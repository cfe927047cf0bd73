"""Runs each hazard's reproduction on ranks with the installed Megatron, stock and patched.

A hazard is proven if stock Megatron fails with the error that its case file names, and the same
code runs with the patches applied. For a hazard that only the caller can avoid, the code that calls
the helper has to run instead. If the case file has a control (a correct program close to the
hazard), it has to run on stock, and to give the same bits with the patches.

`prove` runs every reproduction, whatever `apply()` says about its patch: it is a failure, too, if
stock has the hazard and the patch is left out.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from megatron_idempotent.patching.api import apply
from megatron_idempotent.patching.catalog import hazards, patches
from megatron_idempotent.patching.decide import (
    check_bodies,
    check_installed,
    check_range,
    exact_release,
)
from megatron_idempotent.patching.record import Hazard, Limit, Patch, takes_help
from megatron_idempotent.patching.report import Report
from megatron_idempotent.patching.rows import COVERED, OFF_BY_DEFAULT
from megatron_idempotent.patching.settings import check_ids
from megatron_idempotent.proof.cpu import PROGRAM_PRELOAD, RankError, RankPool, RankTimeout
from megatron_idempotent.proof.cpu.pool import PATIENCE

Verdict = Literal[
    "proven",
    "documented",
    "not_applicable",
    "unpatched",
    "stock_runs",
    "other_error",
    "not_repaired",
    "false_alarm",
]

DEADLINE_S = 120.0
"""Seconds for one reproduction, which takes about one: a slower one has hung.

On a busy machine the deadline grows up to `PATIENCE` times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Holds the outcome of one hazard's reproduction, a program that shows a defect of Megatron,
    with and without patches.

    Example:
        Finding(id="train-interval-timer", verdict="proven", seconds=1.4,
                stock="AssertionError: timer has already been started", patched="ok")
    """

    id: str
    """The hazard."""
    verdict: Verdict
    """`proven`: stock fails as the case file says, and runs with the patches. `documented`: stock
    fails as the case file says, and no patch exists. `not_applicable`: the installed packages do
    not have the hazard, or a package that its program needs is missing. The other five are
    failures. `unpatched`: stock fails as the case file says, `apply()` leaves the patch out, and no
    other patch repairs the hazard. `stock_runs`: `apply()` installs the patch, but stock ran
    without error. `other_error`: `apply()` installs the patch, but stock failed in another way than
    the case file says. `not_repaired`: the program fails with the patches, too. `false_alarm`: the
    patches break the control, which is correct on stock."""
    stock: str
    """The outcome on stock: `ok`, or `Type: message` of the first rank that failed. With the
    verdicts `not_applicable` and `unpatched`, the reason that `apply()` gives."""
    patched: str
    """The outcome with all patches: `ok`, `Type: message`, or `-` if it was not run."""
    seconds: float
    """Seconds of all runs."""
    control: str = "-"
    """The outcome of the control: `ok`, the fault as `stock: …` or `patched: …`, or `-` if there
    is none or it was not run."""

    @property
    def failed(self) -> bool:
        """True if the verdict is a failure: the case file and the installed release disagree."""
        return self.verdict not in ("proven", "documented", "not_applicable")


def prove(
    ids: Iterable[str] | None = None,
    *,
    pool: RankPool | None = None,
    device: str | None = None,
) -> Iterator[Finding]:
    """Run hazards' reproductions on stock and on patched Megatron; yield a `Finding` for each
    hazard, in the order of their ids.

    Args:
        ids: the hazards to run; None for all.
        pool: ranks to run on; None starts a pool and ends it again.
        device: the device of a pool that is started, as for `RankPool`.

    Raises:
        UnknownPatchError: no case file has one of the ids.
        NoDeviceError: `device` is "cuda", and this machine has no GPU for it.
    """
    named_ids = hazards() if ids is None else check_ids(ids, "prove", hazards())
    in_order = [hazard for hazard in hazards().values() if hazard.id in named_ids]
    decided = apply(dry_run=True)
    left_out = {hazard.id: _left_out(hazard, decided) for hazard in in_order}
    runnable = [hazard for hazard in in_order if _runs(hazard)]
    new_pool = None
    if pool is None and runnable:
        ranks = max(hazard.ranks for hazard in runnable)
        # Standard output is for the findings; releases print there while they are imported.
        preload = (*PROGRAM_PRELOAD, __name__, "megatron_idempotent.proof.cpu.program")
        pool = new_pool = RankPool(ranks, preload=preload, stdout=2, device=device)
    try:
        if new_pool is not None:
            new_pool.run(
                1, _ready, distributed=False
            )  # or the first hazard would pay for the imports
        for hazard in in_order:
            if not _runs(hazard):
                yield Finding(
                    id=hazard.id,
                    verdict="not_applicable",
                    stock=_missing(hazard) or str(left_out[hazard.id]),
                    patched="-",
                    seconds=0.0,
                )
            else:
                assert pool is not None
                yield _examine(hazard, pool, left_out[hazard.id])
    finally:
        if new_pool is not None:
            new_pool.close()


def affected() -> list[str]:
    """Return the ids of the hazards (known defects) that the installed Megatron has, and whose
    reproductions find the packages that they need.

    A hazard with a patch is judged by the contents of files, as `apply()` does; one without a patch
    counts if the installed release is in its range.
    """
    decided = apply(dry_run=True)
    return [h.id for h in hazards().values() if _runs(h) and _left_out(h, decided) is None]


def _runs(hazard: Hazard) -> bool:
    """Return whether all packages that the hazard's reproduction needs are installed."""
    return not _missing(hazard) and check_installed(hazard).status is None


def _missing(hazard: Hazard) -> str:
    missing = " ".join(name for name in hazard.needs if find_spec(name) is None)
    return f"not_installed: needs {missing} (pip install {missing})" if missing else ""


def _left_out(hazard: Hazard, decided: Report) -> str | None:
    """Return None if the installed release has the hazard, and the hazard's patch, if there is one,
    fits; otherwise the reason, as `status: reason`.
    """
    if not isinstance(hazard, Patch):
        verdict = check_installed(hazard)
        if verdict.status is None:
            verdict = check_range(hazard, exact_release(hazard.distribution))
    else:
        row = decided[hazard.id]
        if row.status in COVERED:
            return None
        if row.reason != OFF_BY_DEFAULT:
            return f"{row.status}: {row.reason}"
        verdict = check_bodies(hazard, named=False)
    return None if verdict.status is None else f"{verdict.status}: {verdict.reason}"


def outcome(
    run: Callable[..., list[Any]],
    hazard_id: str,
    *,
    applied: Iterable[str],
    helped: bool = False,
) -> str:
    """Run a hazard's reproduction on ranks that have only the patches in `applied`; return `ok`, or
    the error as `Type: message`.

    Args:
        run: `RankPool.run`, or the pytest fixture `megatron_ranks`.
        hazard_id: the hazard.
        applied: the patches to apply; no others are.
        helped: True to have the program call the helper, if the hazard has one.
    """
    error, _ = _run_on_ranks(run, _reproduce, hazard_id, applied, helped)
    return error or "ok"


def control_outcome(run: Callable[..., list[Any]], hazard_id: str) -> str:
    """Run a hazard's control, a correct program close to the hazard, on stock Megatron and with all
    patches. Both runs must succeed, and each rank must return the same bits from both.

    Args:
        run: as for `outcome`.
        hazard_id: the hazard.

    Returns:
        `ok`; `stock: …` if stock raises; `patched: …` if it raises with the patches, or if a bit
        differs; `-` if the hazard has no control.
    """
    if hazards()[hazard_id].control is None:
        return "-"
    error, bits = control_result(run, hazard_id, applied=())
    if error is not None:
        return f"stock: {error}"
    error, patched = control_result(run, hazard_id, applied=patches(), helped=True)
    if error is not None:
        return f"patched: {error}"
    differing = [rank for rank, (a, b) in enumerate(zip(bits, patched, strict=True)) if a != b]
    return f"patched: other bits than stock's on ranks {differing}" if differing else "ok"


def control_result(
    run: Callable[..., list[Any]],
    hazard_id: str,
    *,
    applied: Iterable[str],
    helped: bool = False,
) -> tuple[str | None, list[Any]]:
    """Run a hazard's control on ranks that have only the patches in `applied`. Return the error, or
    None, and each rank's return value. The arguments are those of `outcome`.
    """
    return _run_on_ranks(run, _control, hazard_id, applied, helped)


def _run_on_ranks(
    run: Callable[..., list[Any]],
    function: Callable[..., Any],
    hazard_id: str,
    applied: Iterable[str],
    helped: bool,
) -> tuple[str | None, list[Any]]:
    """Run a function on the hazard's ranks; return its error or None, and the ranks' results."""
    return run_or_error(
        *(run, hazards()[hazard_id].ranks, function, hazard_id, tuple(applied), helped),
        already_applied=set(applied) == set(patches()),
    )


def run_or_error(
    run: Callable[..., list[Any]],
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    **how: Any,
) -> tuple[str | None, list[Any]]:
    """Run a function on ranks within `DEADLINE_S`; return its error or None, and what each rank
    returns.

    An error is `Type: message`. `how` has further arguments of `run`, which is as for `outcome`.
    """
    how |= {"timeout_s": DEADLINE_S, "patience": PATIENCE}
    try:
        return None, run(ranks, function, *arguments, **how)
    except RankError as error:
        if error.exit_code is not None:
            return error.failures[0].folded, []
        kind = error.exception_type.rpartition(".")[2]
        return f"{kind}: {error.message}".strip(), []
    except RankTimeout as error:
        return f"RankTimeout: no end within {error.timeout_s:g} s", []


def _examine(hazard: Hazard, pool: RankPool, left_out: str | None) -> Finding:
    started = time.perf_counter()
    stock = outcome(pool.run, hazard.id, applied=())
    is_there = stock != "ok" and re.search(hazard.stock_error, stock) is not None
    limit = isinstance(hazard, Limit)
    patched = control = "-"
    verdict: Verdict
    if left_out is not None:
        # Another patch may repair the hazard. Without the hazard, the program proves nothing.
        if is_there:
            patched = outcome(pool.run, hazard.id, applied=patches(), helped=True)
        verdict = "unpatched" if is_there and patched != "ok" else "not_applicable"
        stock = left_out
    elif not is_there:
        verdict = "stock_runs" if stock == "ok" else "other_error"
    else:
        verdict = "documented" if limit else "proven"
        patched = "-" if limit else outcome(pool.run, hazard.id, applied=patches(), helped=True)
        if not limit and patched != "ok":
            verdict = "not_repaired"
        else:
            control = control_outcome(pool.run, hazard.id)
            if control.startswith("stock"):
                verdict = "other_error"
            elif control.startswith("patched"):
                verdict = "false_alarm"
    return Finding(
        id=hazard.id,
        verdict=verdict,
        stock=stock,
        patched=patched,
        seconds=time.perf_counter() - started,
        control=control,
    )


def _ready() -> None:
    """Do nothing: a call of this function returns once the pool's ranks have imported torch and
    Megatron.
    """


def _reproduce(hazard_id: str, applied: tuple[str, ...], helped: bool) -> None:
    hazard = hazards()[hazard_id]
    _apply(hazard_id, (*applied, *hazard.given))
    _run(hazard.reproduce, helped)


def _control(hazard_id: str, applied: tuple[str, ...], helped: bool) -> object:
    _apply(hazard_id, applied)
    return _run(hazards()[hazard_id].control, helped)


def _run(program: Any, helped: bool) -> object:
    return program(helped=helped) if takes_help(program) else program()


def _apply(hazard_id: str, applied: tuple[str, ...]) -> None:
    # What upstream logs on every rank would bury the table of findings.
    logging.disable(logging.WARNING)
    # Ranks are forked afresh for every run, so nothing has to be reverted.
    apply(exclude=set(patches()) - set(applied))
    if hazard_id in applied and not patches()[hazard_id].default:
        apply(only=[hazard_id])
