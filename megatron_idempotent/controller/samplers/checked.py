"""Answers of a sampler, checked where they are used: a custom one may be wrong."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_idempotent.controller.errors import ControllerError
from megatron_idempotent.controller.protocol import Ready, Sampler
from megatron_idempotent.controller.records import Held


class SamplerError(ControllerError):
    """A sampler answered with groups that it may not; the message names it and them."""


def checked_select(sampler: Sampler, ready: Ready, *, version: int, count: int) -> tuple[Held, ...]:
    """The groups that a sampler selects, at most `count`, each ready and named once.

    Errors: `SamplerError`.
    """
    groups = _checked(sampler, "select", sampler.select(ready, version=version, count=count), ready)
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
    return _checked(sampler, "evict", sampler.evict(ready, version=version), ready)


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
