"""Checks that the patches are still in place, and the same on every rank."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from . import install
from .api import report
from .base import PatchError, VerificationError
from .catalog import load, outlines
from .report import PROBLEMS, Report, Row


def verify(group: Any = None) -> Report:
    """Check the patches of this process and, if a process group is up, of all its ranks.

    Half-patched ranks hang in collectives, long after the cause. Call this once after
    initialisation, on every rank of `group`: it gathers a digest of (id, status, upstream version,
    upstream body, our code) over them, and raises on all of them if it raises on one.

    Args:
        group: a `torch.distributed` process group; None means the default one. Without an
            initialised process group only this process is checked.

    Returns:
        The report of this process.

    Raises:
        VerificationError: a patched function was replaced, or ranks differ; in strict mode also
            live code goes past a patch, as a subclass that overrides the method does. The message
            names them; without strict mode a warning is logged of the last.
        PatchError: in strict mode, if a patch of this process has a problem.
    """
    failure: PatchError | VerificationError | None = None
    try:
        result = report()
        _check_in_place(result)
    except (PatchError, VerificationError) as error:
        failure = error
        result = Report(install.current(patch) for patch in outlines().values())
    distributed = sys.modules.get("torch.distributed")
    up = distributed and distributed.is_available() and distributed.is_initialized()
    if distributed and up and distributed.get_world_size(group) > 0:  # -1 outside of the group
        gathered: list[Any] = [None] * distributed.get_world_size(group)
        mine = (
            distributed.get_rank(),
            {row.id: _digest(row) for row in result},
            failure and str(failure),
        )
        # All ranks of the group must enter, also one that already knows of a failure: the others
        # hang otherwise.
        distributed.all_gather_object(gathered, mine, group=group)
        if failure is None:
            failure = _compare(gathered)
    if failure is not None:
        raise failure
    return result


def _check_in_place(result: Report) -> None:
    passed = [f"{row.id} ({row.reason})" for row in result if install.PAST in row.reason]
    if passed:
        said = f"in place, and live code goes past them: {'; '.join(passed)}"
        if install.state.selection is not None and install.state.selection.strict:
            raise VerificationError(f"{said}; exclude= these patches, or let that code call them")
        logging.getLogger("megatron_idempotent").warning("%s", said)
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
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if ranks[8:] else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _digest(row: Row) -> str:
    import hashlib  # here, as apply() has no use for them
    import inspect

    status = "applied" if row.status == "already_applied" else row.status
    code = hashlib.sha256()
    for target in load(row.id).targets:
        site = install.state.sites.get(target.address)
        if site is not None and row.id in site.layers:
            code.update(site.body.encode())
        # The whole case file, because wrappers call functions beside them.
        code.update(inspect.getsource(sys.modules[target.wrapper.__module__]).encode())
    return f"{status} {row.version} ({code.hexdigest()[:8]})"
