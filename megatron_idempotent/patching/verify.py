"""Checks that patches are still in place, and are the same on every rank."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

from . import import_hooks, install
from .api import report
from .base import PatchError, VerificationError
from .catalog import index_entries, load
from .report import Report
from .rows import COVERED, PAST, PROBLEMS, Row
from .settings import SWITCH


def verify(group: Any = None) -> Report:
    """Check that the patches of this process are in place and, if a process group is up, the same
    on all its ranks. Return the report, or raise `VerificationError`.

    If ranks have different patches, collectives hang long after the cause. Call this once after
    initialisation, on every rank of `group`: it gathers a digest of (id, status, upstream version,
    upstream body, our code) over the ranks, and raises on all of them if it raises on one.

    Args:
        group: a `torch.distributed` process group; None means the default one. Without an
            initialised process group only this process is checked.

    Returns:
        The report of this process.

    Raises:
        VerificationError: `apply()` was not called in this process, and no import will call it; a
            patched function was replaced; or ranks differ. In strict mode also if live code
            bypasses a patch, such as a subclass that overrides the method; without strict mode
            that is logged as a warning. The message has the names.
        PatchError: in strict mode, if a patch of this process has a problem.
    """
    result, failure = _checked_here()
    distributed = sys.modules.get("torch.distributed")
    up = distributed and distributed.is_available() and distributed.is_initialized()
    if distributed and up and distributed.get_world_size(group) > 0:  # -1 outside of the group
        gathered: list[Any] = [None] * distributed.get_world_size(group)
        own_report = _told(distributed.get_rank(), result, failure)
        # All ranks of the group must enter, also one that has already failed: the others would
        # hang.
        distributed.all_gather_object(gathered, own_report, group=group)
        if failure is None:
            failure = _compare(gathered)
    if failure is not None:
        raise failure
    return result


def verify_at_start() -> None:
    """Check once, in this rank's first schedule call, that all ranks of the job have the same
    patches. The ranks send their lists of patches through the process group's store, not by a
    collective.

    A rank without patches would not enter a collective. So each rank writes its patches to the
    default process group's store; rank 0 compares them, and prints the result to standard error.

    Raises:
        VerificationError: on every rank that checks: a rank has written nothing within
            `state.verify_within` seconds, or ranks differ, as in `verify()`.
    """
    from datetime import timedelta  # here, because apply() does not use it

    within, install.state.verify_within = install.state.verify_within, 0.0
    distributed = sys.modules.get("torch.distributed")
    if not distributed or not distributed.is_available() or not distributed.is_initialized():
        return
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    if ranks == 1:
        return
    store = distributed.distributed_c10d._get_default_store()
    keys = [f"{SWITCH}/patches of rank {rank_number}" for rank_number in range(ranks)]
    verdict = f"{SWITCH}/verdict"
    store.set(keys[rank], json.dumps(_told(rank, *_checked_here())))
    if rank == 0:
        try:
            store.wait(keys, timedelta(seconds=within))
            failure = _compare([json.loads(store.get(key)) for key in keys])
        except distributed.DistStoreError:
            silent = [rank_number for rank_number, key in enumerate(keys) if not store.check([key])]
            failure = _unpatched(silent, within)
        store.set(verdict, str(failure or ""))
        if failure is None:
            count = sum(row.status in COVERED for row in report())
            print(f"megatron-idempotent: {count} patches on all {ranks} ranks", file=sys.stderr)
    else:
        try:
            # Twice as long, because rank 0's wait begins with its own first call.
            store.wait([verdict], timedelta(seconds=2 * within))
            failure_text = store.get(verdict).decode()
            failure = VerificationError(failure_text) if failure_text else None
        except distributed.DistStoreError:
            failure = _unpatched([0], 2 * within)
    if failure is not None:
        raise failure


def _unpatched(ranks: Sequence[int], within: float) -> VerificationError:
    return VerificationError(
        f"no patches on {_some(ranks)}, {within:g} s after the first training call of another one: "
        f"start its process with {SWITCH}=1 where `megatron-idempotent hook install` has run. "
        f"{SWITCH}_VERIFY is the number of seconds, and 0 turns this check off"
    )


def _checked_here() -> tuple[Report, PatchError | VerificationError | None]:
    """Return the report of this process, and the error that `verify` has found here, or None."""
    try:
        result = report()
        if install.state.selection is None and not import_hooks.door_waits():
            raise VerificationError(
                "no patch is in place: apply() was not called in this process. Call it first; "
                f"{SWITCH}=0 turns patches off"
            )
        _check_in_place(result)
    except (PatchError, VerificationError) as error:
        return Report(install.current(patch) for patch in index_entries().values()), error
    return result, None


def _told(
    rank: int, result: Report, failure: Exception | None
) -> tuple[int, dict[str, str], str | None]:
    """Return what this rank sends to other ranks: its rank number, patch id → digest of the patch's
    report row, and the message of the error that `verify` found on this rank, or None.
    """
    failure_text = None if failure is None else str(failure)
    return rank, {row.id: _digest(row) for row in result}, failure_text


def _check_in_place(result: Report) -> None:
    passed = [f"{row.id} ({row.reason})" for row in result if PAST in row.reason]
    if passed:
        warning = f"in place, and live code goes past them: {'; '.join(passed)}"
        if install.state.selection is not None and install.state.selection.strict:
            raise VerificationError(
                f"{warning}; exclude= these patches, or let that code call them"
            )
        logging.getLogger("megatron_idempotent").warning("%s", warning)
    on = {patch_id for site in install.state.sites.values() for patch_id in site.layers}
    replaced = [
        f"{row.id} ({row.reason})" for row in result if row.status in PROBLEMS and row.id in on
    ]
    if replaced:
        raise VerificationError(
            f"no longer in place: {', '.join(replaced)}; call apply() after whatever replaced them"
        )


def _compare(
    gathered: Sequence[tuple[int, dict[str, str], str | None]],
) -> VerificationError | None:
    failures = [f"rank {rank}: {failure}" for rank, _, failure in gathered if failure]
    if failures:
        return VerificationError("; ".join(failures))
    differing = []
    for patch_id in sorted({patch_id for _, digests, _ in gathered for patch_id in digests}):
        ranks: dict[str, list[int]] = {}
        for rank, digests, _ in gathered:
            ranks.setdefault(digests.get(patch_id, "unknown"), []).append(rank)
        if len(ranks) > 1:
            parts = [f"{digest} on {_some(members)}" for digest, members in ranks.items()]
            differing.append(f"{patch_id}: {', '.join(parts)}")
    if not differing:
        return None
    return VerificationError(
        f"ranks are patched differently: {'; '.join(differing)}; call apply() on every rank, with "
        "the same arguments, before Megatron is used"
    )


def _some(ranks: Sequence[int]) -> str:
    ranks_text = ", ".join(map(str, ranks[:8])) + (
        f" and {len(ranks) - 8} more" if ranks[8:] else ""
    )
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text}"


def _digest(row: Row) -> str:
    import hashlib  # here, because apply() does not use them
    import inspect

    status = "applied" if row.status == "already_applied" else row.status
    code = hashlib.sha256()
    for target in load(row.id).targets:
        site = install.site_of(target)
        if site is not None and row.id in site.layers:
            code.update(site.body.encode())
        # The whole case file, because wrappers call its other functions.
        code.update(inspect.getsource(sys.modules[target.wrapper.__module__]).encode())
    return f"{status} {row.version} ({code.hexdigest()[:8]})"
