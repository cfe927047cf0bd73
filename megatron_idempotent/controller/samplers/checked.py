"""Answers of a sampler, checked where they are used: a custom one may be wrong."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

from megatron_idempotent.controller.errors import ControllerError
from megatron_idempotent.controller.protocol import Ready, Sampler
from megatron_idempotent.controller.records import Admission, Held


class SamplerError(ControllerError):
    """A sampler raised, or gave an answer that it may not; the message names it and the fault."""


def checked_select(sampler: Sampler, ready: Ready, *, version: int, count: int) -> tuple[Held, ...]:
    """The groups that a sampler selects, at most `count`, each ready and named once.

    Errors: `SamplerError`.
    """
    answer = asked(sampler, "select", ready, version=version, count=count)
    groups = _checked(sampler, "select", answer, ready)
    if len(groups) > count:
        raise SamplerError(
            f"sampler {sampler.name} selected {len(groups)} groups of {count} that were asked for; "
            "return `count` at most"
        )
    return groups


def checked_evict(sampler: Sampler, ready: Ready, *, version: int) -> tuple[Held, ...]:
    """The groups that a sampler gives up, each ready and named once.

    Errors: `SamplerError`.
    """
    return _checked(sampler, "evict", asked(sampler, "evict", ready, version=version), ready)


def checked_room(sampler: Sampler, admission: Admission) -> float:
    """Returns how many more groups a sampler lets start. Errors: `SamplerError`."""
    answer = asked(sampler, "room", admission)
    if not isinstance(answer, numbers.Real):
        raise SamplerError(
            f"sampler {sampler.name}: room returned {answer!r}; return a number of groups"
        )
    return float(answer)


def asked(sampler: Sampler, method: str, *args: Any, **named: Any) -> Any:
    """The answer of a sampler's method. Errors: `SamplerError` for whatever it raises."""
    try:
        return getattr(sampler, method)(*args, **named)
    except Exception as error:
        raise SamplerError(f"sampler {sampler.name}: {method} raised {error!r}") from error


def _checked(
    sampler: Sampler, method: str, answer: Iterable[Held], ready: Ready
) -> tuple[Held, ...]:
    try:
        groups = tuple(answer)
    except TypeError as error:
        raise SamplerError(
            f"sampler {sampler.name}: {method} returned a {type(answer).__name__}; return the "
            "groups, or an empty list"
        ) from error
    seen: set[int] = set()
    for held in groups:
        if held not in ready:
            raise SamplerError(
                f"sampler {sampler.name}: {method} returned {held!r}, which is not among the "
                f"{len(ready)} ready groups; return groups that `ready` gives"
            )
        if held.id in seen:
            raise SamplerError(
                f"sampler {sampler.name}: {method} returned group {held.id} twice; return each once"
            )
        seen.add(held.id)
    return groups
