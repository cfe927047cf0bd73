"""Shares what tests of several patches do with a bench."""

from __future__ import annotations

from typing import Any

import megatron_idempotent


def abort(model: Any) -> None:
    """Run `abort_window` on the bench's chunks and optimizer."""
    megatron_idempotent.abort_window(model.chunks, model.optimizer)


def agree(model: Any) -> bool:
    """Return whether the data-parallel ranks hold the same parameters."""
    from megatron_idempotent.patches import _scenarios

    try:
        _scenarios.expect_agreement(model, "in the test")
    except RuntimeError:
        return False
    return True


def groups(model: Any) -> list[Any]:
    """Return the bucket groups of all chunks."""
    from megatron_idempotent.megatron.ddp import bucket_groups

    return [group for chunk in model.chunks for group in bucket_groups(chunk)]
