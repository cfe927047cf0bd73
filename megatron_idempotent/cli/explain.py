"""`explain`: the case file of one hazard, or a list of all."""

from __future__ import annotations

from megatron_idempotent.casebook import case_text
from megatron_idempotent.engine.catalogue import hazards
from megatron_idempotent.engine.settings import check_ids
from megatron_idempotent.engine.table import render


def explain(patch_id: str | None) -> int:
    """Print the case file, or without an id one line per hazard; always 0.

    Raises:
        UnknownPatchError: no case file has that id.
    """
    if patch_id is None:
        rows = [(hazard.id, hazard.summary) for hazard in hazards().values()]
        print(render(("id", "on stock Megatron"), rows))
        return 0
    patch_id = as_id(patch_id)
    check_ids([patch_id], "explain", hazards())
    print(case_text(hazards()[patch_id]))
    return 0


def as_id(text: str) -> str:
    """Take the name of a case file for its id: `no_sync_func_reentry` or `….py`."""
    return text.removesuffix(".py").replace("_", "-")
