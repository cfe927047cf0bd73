"""Patches that keep one promise together, and what is left of it where one of them is missing.

Each member repairs a hazard of its own, and none breaks a program for want of another: a group is
applied as far as it goes. But who uses what it is for meets the hazard that is left.
"""

from __future__ import annotations

from .frozen import Record
from .report import COVERED, PROBLEMS

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .record import Patch
    from .report import Row


class Group(Record):
    """Something that takes several patches."""

    promise: str
    """The promise that holds if all members are applied, as a sentence."""
    instead: str
    """The advice if a member is missing, as a request."""


GROUPS: Mapping[str, Group] = {
    "train-again": Group(
        promise="train() can be called again, and k calls are as one long call",
        instead="call train() once in a process",
    ),
    "overlap": Group(
        promise="overlapped reductions and gathers are right for any sequence of windows",
        instead="leave overlap_grad_reduce and overlap_param_gather off",
    ),
    "abort": Group(
        promise="after an exception the next step is right",
        instead="end the ranks after an exception, and resume from a checkpoint",
    ),
    "offload": Group(
        promise="offloaded gradient buffers lose nothing, or say so",
        instead="offload gradient buffers after a step only, and restore them before zeroing them",
    ),
    "aux-loss": Group(
        promise="auxiliary losses and expert biases do not depend on how a step is cut",
        instead="make one schedule call of the same number of microbatches per step",
    ),
    "deferred-embedding": Group(
        promise="a deferred embedding gradient is in the step that it belongs to",
        instead="leave defer_embedding_wgrad_compute off",
    ),
    "layer-wise": Group(
        promise="forwards around a step of the layer-wise optimizer see and change nothing",
        instead="leave overlap_param_gather off with the layer-wise optimizer",
    ),
    "loss-scale": Group(
        promise="gradients are multiplied and divided by the loss scale once",
        instead="train in bf16 or float32",
    ),
    "generation": Group(
        promise="generation in the process that trains leaves the training as it was",
        instead="generate in another process",
    ),
}

_BY_HAND = "named in "


def incomplete(rows: Iterable[Row], patches: Mapping[str, Patch]) -> list[str]:
    """Say which groups are applied in part: what is missing, what that means, what to do instead.

    A patch that this Megatron does not need is not missing, nor one that `only=` leaves out.
    """
    statuses = {row.id: row for row in rows}
    found = []
    for name, group in GROUPS.items():
        members = [patch for patch in patches.values() if name in patch.groups]
        missing = [patch for patch in members if _is_missing(statuses[patch.id])]
        if not missing or not any(statuses[each.id].status in COVERED for each in members):
            continue
        what = "; ".join(
            f"{each.id} is {statuses[each.id].status} ({each.summary})" for each in missing
        )
        found.append(
            f"group {name} is not whole ({group.promise}): {what}. Without it {group.instead}"
        )
    return found


def _is_missing(row: Row) -> bool:
    by_hand = row.status == "disabled" and row.reason.startswith(_BY_HAND)
    return row.status in PROBLEMS or by_hand
