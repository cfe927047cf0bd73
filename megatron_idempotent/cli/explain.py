"""`explain ID`: the case file of one hazard."""

from __future__ import annotations

from megatron_idempotent.casebook import case_text
from megatron_idempotent.engine.catalogue import hazards
from megatron_idempotent.engine.settings import check_ids


def explain(patch_id: str) -> int:
    """Print the case file.

    Raises:
        UnknownPatchError: no case file has that id.
    """
    check_ids([patch_id], "explain", hazards())
    print(case_text(hazards()[patch_id]))
    return 0
