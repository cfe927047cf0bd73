"""Defines the names in batches of a split step, and the options that a step is made with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args

from megatron_idempotent.fp8.packing import TokenAlignment
from megatron_idempotent.window.agreement import checked_deadline

NonFinite = Literal["refuse", "skip", "update"]
"""The act of `finish` if a loss or the norm of the gradients is NaN or infinite: raise, drop the
gradients and go on, or update all the same."""

NothingValid = Literal["skip", "update"]
"""The act of `finish` if nothing is valid on any rank: leave all as it is, or let the optimizer
step with gradients that are divided by 1."""

Batch = Mapping[str, Any]
"""Tensors, lists and tuples with an item per row; scalars, and what a step shares, are for all."""

TOKENS, SAMPLE_MASK, TOKEN_MASK = "input_ids", "sample_mask", "token_mask"
"""Names in a batch of the rows' tokens [B, T], and of the masks of valid rows [B] and tokens."""

POSITIONS = "position_ids"
"""Name in a batch of each token's position [B, T], if the model is not to count them itself."""

COUNTS = "counts"
"""Name in a ready microbatch of its valid sequences and tokens, if the caller has counted."""

LENGTHS, ATTENTION_MASK = "lengths", "attention_mask"
"""Names in a batch of each row's number of real tokens [B], and of their mask [B, T]; budgets of
tokens need one."""

PACK = "pack"
"""Name in a microbatch of the `Pack` that a step has made of rows."""

GROUP_IDS = "group_ids"
"""Name in a batch of the id of each sequence's group, if a loss is divided by groups."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Holds the options that `TrainStep` and `FSDPTrainStep` share.

    Example: `checked_options(20.0, "refuse", ())`.
    """

    deadline_s: float
    non_finite: NonFinite
    shared: frozenset[str]
    """Names in batches that all rows share."""
    shape: Callable[[Any], tuple[int, int]] | None = None
    """A function that returns rows and positions of a ready microbatch; None for `input_ids`'."""
    counts: Callable[[Any], Any] | None = None
    """A function that returns valid sequences and tokens of a ready microbatch; None to count."""
    nothing_valid: NothingValid = "skip"
    alignment: TokenAlignment | None = None
    """Multiples of tokens that packs are padded to; None for those of the model's config."""
    tenant: str | None = None
    """The name of a `TrainStep` beside which others are open over the same modules; else None."""


def check_size(what: str, name: str, value: Any) -> None:
    """Raise `ValueError` unless the value is None or a positive integer."""
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{what}() takes a positive int as {name}, got {value!r}")


def check_id(microbatch_id: Any) -> None:
    """Raise `ValueError` unless a batch can be known by this name."""
    if not isinstance(microbatch_id, str):
        raise ValueError(f"microbatch() takes a str as microbatch_id, got {microbatch_id!r}")


def check_lr(lr: Any) -> None:
    """Raise `ValueError` unless the learning rate is None or a finite number from 0 on."""
    if lr is None:
        return
    number = isinstance(lr, (int, float)) and not isinstance(lr, bool)
    if not number or not (0 <= lr < math.inf):
        raise ValueError(f"finish() takes a finite number from 0 on as lr, got {lr!r}")


def checked_options(
    deadline_s: Any,
    non_finite: Any,
    shared: Any,
    shape: Any = None,
    counts: Any = None,
    nothing_valid: Any = "skip",
    alignment: Any = None,
    tenant: Any = None,
) -> Options:
    """Check the options, and return them as one record.

    Raises:
        ValueError: the deadline is no positive finite number, a choice is unknown, `shared` is no
            collection of names or names tokens or masks, `shape` or `counts` cannot be called,
            `alignment` is no `TokenAlignment`, or `tenant` is no name.
    """
    if alignment is not None and not isinstance(alignment, TokenAlignment):
        raise ValueError(f"alignment takes a TokenAlignment, got {alignment!r}")
    if tenant is not None and (not isinstance(tenant, str) or not tenant):
        raise ValueError(f"tenant takes a name, got {tenant!r}")
    for name, function in (("shape", shape), ("counts", counts)):
        if function is not None and not callable(function):
            raise ValueError(f"{name} takes a function of a ready microbatch, got {function!r}")
    for name, value, choices in (
        ("non_finite", non_finite, get_args(NonFinite)),
        ("nothing_valid", nothing_valid, get_args(NothingValid)),
    ):
        if value not in choices:
            known = ", ".join(map(repr, choices))
            raise ValueError(f"{name} must be one of {known}, got {value!r}")
    names = not isinstance(shared, str) and isinstance(shared, Collection)
    if not names or not all(isinstance(name, str) for name in shared):
        raise ValueError(f"shared must be a collection of names in batches, got {shared!r}")
    counted = {TOKENS, SAMPLE_MASK, TOKEN_MASK}.intersection(shared)
    if counted:
        raise ValueError(
            f"shared names {sorted(counted)}, by whose rows a step counts: leave them out"
        )
    return Options(
        deadline_s=checked_deadline(deadline_s),
        non_finite=non_finite,
        shared=frozenset(shared),
        shape=shape,
        counts=counts,
        nothing_valid=nothing_valid,
        alignment=alignment,
        tenant=tenant,
    )


def check_made_with(what: str, forward: Any, **switches: Any) -> None:
    """Raise `TypeError` unless `forward` can be called, and the other arguments are switches."""
    if not callable(forward):
        raise TypeError(
            f"{what}() takes a function of (model, microbatch) as forward, got {forward!r}: leave "
            "it out for the usual one"
        )
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{what}() takes True or False as {name}, got {value!r}")


def skipped_for(grad_norm: float, rule: NonFinite) -> str | None:
    """Return the reason to skip the update; None if it is to be made.

    All ranks decide the same, because the norm is that of all ranks.

    Raises:
        RuntimeError: the norm is not finite, and the rule is "refuse".
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
