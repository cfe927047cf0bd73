"""Decide what becomes of a step whose gradients are not finite."""

from __future__ import annotations

import math

from .records import NonFinite


def skipped_for(grad_norm: float, rule: NonFinite) -> str | None:
    """Return why the update is to be skipped; None where it is to be made.

    All ranks decide the same, because the norm is that of all ranks.

    Raises:
        RuntimeError: the norm is not finite, and the rule is to refuse that.
    """
    if math.isfinite(grad_norm) or rule == "update":
        return None
    found = f"the norm of the gradients is {grad_norm}"
    if rule == "skip":
        return f"{found}, and non_finite='skip'"
    raise RuntimeError(
        f"{found}, and the update would spread that to all parameters; no rank has begun it. "
        "non_finite='skip' drops such steps"
    )
