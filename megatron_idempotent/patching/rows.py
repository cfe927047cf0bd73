"""Defines a row of a report: the outcome of one patch, and the words of its reason."""

from __future__ import annotations

from .base import Record

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from typing import Any, Literal

    Status = Literal[
        "applied",
        "already_applied",
        "disabled",
        "not_installed",
        "unsupported_version",
        "missing_target",
        "fixed_upstream",
        "drifted",
        "conflict",
        "pending_import",
        "failed",
    ]

# Statuses that a person has to look into: this Megatron has the hazard and not the patch.
PROBLEMS: frozenset[str] = frozenset({"failed", "drifted", "conflict"})
# Statuses of patches that are in place, or will be when Megatron is imported.
COVERED: frozenset[str] = frozenset({"applied", "already_applied", "pending_import"})


class Row(Record):
    """Holds one patch's outcome in this process: status, reason, installed version, targets.

    Example:
        Row(id="grad-scale-func", status="applied", reason="body reviewed on 0.19.0 to 0.19.2",
            version="0.19.2", targets=("megatron.core.optimizer:get_megatron_optimizer",))
    """

    id: str
    status: Status
    reason: str
    version: str | None
    """Installed version of the distribution that the patch belongs to; None if there is none."""
    targets: tuple[str, ...]
    """`module:qualname` of every function that the patch wraps."""

    def as_dict(self) -> dict[str, Any]:
        """Return the row's fields by name, as a new dictionary."""
        return dict(vars(self))


# Words of reasons, by which callers group rows.
FILES_DECIDE = "its files decide when"
OFF_BY_DEFAULT = "off by default: name it in only= to apply it"
REVERTED = "reverted"
LEFT = "bound before us and left alone"
PAST = "calls go past it"
INSIDE, OUTSIDE = "runs inside of ours", "runs outside of ours"
