"""Check that the patches are still in place, and the same on every rank."""

from __future__ import annotations

import hashlib
import inspect
import sys
from typing import Any

from . import landing
from .catalogue import patches
from .control import report
from .errors import VerificationError
from .report import PROBLEMS, Report


def verify(group: Any = None) -> Report:
    """Check the patches of this process and, where a process group is up, of all its ranks.

    Half-patched ranks hang in collectives, long after the cause. Call this once after
    initialisation, on every rank of `group`: it gathers a digest of (id, status, upstream version,
    upstream body, our code) over them.

    Args:
        group: a `torch.distributed` process group; None means the default one. Without an
            initialised process group only this process is checked.

    Returns:
        The report of this process.

    Raises:
        VerificationError: a patched function was replaced, or ranks differ; names which.
        PatchError: in strict mode, where a patch has a problem.
    """
    result = report()
    replaced = [
        f"{row.id} ({row.reason})" for row in result if row.status in PROBLEMS and _was_on(row.id)
    ]
    if replaced:
        raise VerificationError(
            f"no longer in place: {', '.join(replaced)}; call apply() after whatever replaced them"
        )
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return result
    digest = {row.id: _digest(row.id, row.status, row.version) for row in result}
    # All ranks of the group must enter: the gather hangs otherwise.
    gathered: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(gathered, digest, group=group)
    differing = [
        f"{patch_id}: "
        + ", ".join(f"rank {rank} {d.get(patch_id)}" for rank, d in enumerate(gathered))
        for patch_id in sorted({patch_id for d in gathered for patch_id in d})
        if len({d.get(patch_id) for d in gathered}) > 1
    ]
    if differing:
        raise VerificationError(
            "ranks are patched differently (ranks within the group): "
            + "; ".join(differing)
            + "; call apply() on every rank, with the same arguments, before Megatron is used"
        )
    return result


def _was_on(patch_id: str) -> bool:
    return any(patch_id in site.layers for site in landing.state.sites.values())


def _digest(patch_id: str, status: str, version: str | None) -> str:
    on = "applied" if status == "already_applied" else status
    code = hashlib.sha256()
    for target in patches()[patch_id].targets:
        site = landing.state.sites.get(target.address)
        if site is not None and patch_id in site.layers:
            code.update(inspect.getsource(site.original).encode())
        code.update(inspect.getsource(target.wrapper).encode())
    return f"{on} on {version} ({code.hexdigest()[:8]})"
