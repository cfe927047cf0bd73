"""Samplers decide which groups start, which train next, and which are too stale.

The controller calls them through `chosen` and `call_sampler`, which check their results, because a
custom sampler may be wrong.
"""

from __future__ import annotations

import heapq
import inspect
import itertools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from megatron_idempotent.rl.metrics.loggers import SettingsError, import_named

from .protocol import Admission, ControllerError, Generating, Held, Ready, Sampler


class SamplerError(ControllerError):
    """A sampler's method raised an error or returned a wrong result; the message names sampler,
    method and fault.
    """


def chosen(
    sampler: Sampler, method: Literal["select", "evict", "abort"], ready: Ready, **arguments: int
) -> tuple[Any, ...]:
    """Call the sampler's method `select`, `evict` or `abort`, check the groups that it returns, and
    return them.

    `arguments` are the method's other arguments. A sampler without a method `abort` aborts none.

    Raises:
        SamplerError: the sampler raised, or returned unknown groups, duplicates or too many.
    """
    if method == "abort" and not hasattr(sampler, "abort"):
        return ()
    answer = call_sampler(sampler, method, ready, **arguments)
    subject = f"sampler {sampler.name}: {method} returned"
    try:
        groups = tuple(answer)
    except TypeError as error:
        raise SamplerError(
            f"{subject} a {type(answer).__name__}; return the groups, or an empty list"
        ) from error
    kind: type[Any] = Generating if method == "abort" else Held
    distinct: set[Any] = set()
    for group in groups:
        if not isinstance(group, kind) or group not in ready:
            among = (
                "is not being generated; return groups that `ready.generating()` gives"
                if method == "abort"
                else f"is not among the {len(ready)} ready groups; return groups that `ready` gives"
            )
            raise SamplerError(f"{subject} {group!r}, which {among}")
        if group in distinct:
            raise SamplerError(f"{subject} group {group.id} twice; return each once")
        distinct.add(group)
    if len(groups) > arguments.get("count", len(groups)):
        raise SamplerError(
            f"{subject} {len(groups)} groups of {arguments['count']} that were asked for; return "
            "`count` at most"
        )
    return groups


def checked_room(sampler: Sampler, admission: Admission) -> float:
    """Return the number that a sampler's `room` returns, i.e. how many more groups may start. Raise
    `SamplerError` if the result is not a number.

    Raises:
        SamplerError: the sampler raised, or returned something other than a real number.
    """
    answer = call_sampler(sampler, "room", admission)
    if not isinstance(answer, numbers.Real):
        raise SamplerError(
            f"sampler {sampler.name}: room returned {answer!r}; return a number of groups"
        )
    return float(answer)


def call_sampler(sampler: Sampler, method: str, *args: Any, **named_args: Any) -> Any:
    """Call the sampler's method with the name `method`, and return the method's result; an error
    becomes a `SamplerError`.

    Raises:
        SamplerError: the method raised.
    """
    try:
        return getattr(sampler, method)(*args, **named_args)
    except Exception as error:
        raise SamplerError(f"sampler {sampler.name}: {method} raised {error!r}") from error


# More than any buffer's capacity.
_ALL = 2**31


class FirstReadySampler:
    """Trains groups in the order in which they complete, and never evicts one.

    Staleness is unbounded: a slow group may be any number of versions old when it completes. Only
    the buffer's capacity limits how many groups start early. Example: `FirstReadySampler()`.
    """

    name = "first_ready"
    max_staleness = None
    drains = False

    def required_capacity(self, groups_per_step: int) -> int:
        """Return `groups_per_step`: a buffer for the groups of one step is enough."""
        return groups_per_step

    def room(self, admission: Admission) -> int:
        """Return a number above any capacity, so that the capacity is the only limit."""
        del admission
        return _ALL

    def select(self, ready: Ready, *, version: int, count: int) -> Sequence[Held]:
        """Return the first `count` ready groups by arrival."""
        del version
        return list(itertools.islice(ready, count))

    def evict(self, ready: Ready, *, version: int) -> Sequence[Held]:
        """Return no group, because no group is too stale for this sampler."""
        del ready, version
        return ()


class _Windowed:
    """The base class of samplers that start no more groups than can train before the groups' age
    exceeds `window` versions.
    """

    def __init__(self, name: str, window: int) -> None:
        if type(window) is not int or window < 0:
            raise SettingsError(f"{name} is {window!r}; allowed: 0 or more versions")
        self._window = window

    @property
    def max_staleness(self) -> int:
        """The largest staleness at which a group may train, in versions."""
        return self._window

    def required_capacity(self, groups_per_step: int) -> int:
        """Return `groups_per_step` x (window + 1), the most groups that `room` lets exist at once.

        With less capacity, training would wait for groups that the window allows to start.
        """
        return groups_per_step * (self._window + 1)

    def room(self, admission: Admission) -> int:
        """Return how many more groups may start, such that each group can train while it is at most
        `window` versions old.

        This is (window + rollout_version + 1) x groups_per_step - accepted - running, or 0 if that
        is negative: an optimizer step uses groups_per_step groups and makes one version, so the
        last accepted group trains at version window + rollout_version at the latest.
        """
        steps = self._window + admission.rollout_version + 1
        return max(0, steps * admission.groups_per_step - admission.accepted - admission.running)


Order = Literal["freshest", "oldest"]
"""Selects which groups train first: `freshest` by staleness, then arrival; `oldest` by arrival
alone."""


class WindowedSampler(_Windowed):
    """Trains only groups that are at most `max_staleness` versions old, and evicts older ones. A
    group's age is version - held.version.

    Example: `WindowedSampler(max_staleness=2)`.
    """

    name = "windowed"
    drains = False

    def __init__(
        self,
        max_staleness: int,
        order: Order = "freshest",
        *,
        gated: bool = True,
        abort_stale: bool = False,
    ) -> None:
        """Check and keep the options; raise `SettingsError` if one is invalid.

        Args:
            max_staleness: the largest `version - held.version` at which a group may train.
            order: the groups that train first, `freshest` or `oldest`.
            gated: True to start only groups that can train within the window. With False, capacity
                is the only limit, and more groups are evicted.
            abort_stale: True to abort groups that become too stale while they are being generated.

        Raises:
            SettingsError: the window is below 0, the order is unknown, or a type is wrong.
        """
        super().__init__("max_staleness", max_staleness)
        if order not in get_args(Order):
            raise SettingsError(f"order is {order!r}; allowed: {', '.join(get_args(Order))}")
        for name, value in (("gated", gated), ("abort_stale", abort_stale)):
            if type(value) is not bool:
                raise SettingsError(f"{name} is {value!r}; allowed: true or false")
        self._order, self._gated, self._abort_stale = order, gated, abort_stale

    def room(self, admission: Admission) -> int:
        """Return how many more groups may start such that each can train before it is too old.
        Without `gated`, return a number above any capacity instead, or 0 while the engines' weights
        are more than `max_staleness` versions older than the trainer's.
        """
        if self._gated:
            return super().room(admission)
        lag = admission.trainer_version - admission.rollout_version
        return _ALL if lag <= self._window else 0

    def select(self, ready: Ready, *, version: int, count: int) -> Sequence[Held]:
        """Return up to `count` ready groups within the window, in the sampler's order."""
        eligible = [group for group in ready if 0 <= version - group.version <= self._window]
        if self._order == "freshest":
            eligible.sort(key=lambda group: -group.version)
        return eligible[:count]

    def evict(self, ready: Ready, *, version: int) -> Sequence[Held]:
        """Return all complete groups that are older than the window, which no step may train."""
        return [group for group in ready if version - group.version > self._window]

    def abort(self, ready: Ready, *, version: int) -> Sequence[Generating]:
        """Return the generating groups that are older than the window; none without
        `abort_stale`.
        """
        if not self._abort_stale:
            return ()
        return [group for group in ready.generating() if version - group.version > self._window]


class StrictSampler(WindowedSampler):
    """Trains strictly on-policy: only groups that were sampled with the current weights.

    Example: `StrictSampler()`.
    """

    name = "strict"

    def __init__(self, *, gated: bool = True, abort_stale: bool = False) -> None:
        """Take `gated` and `abort_stale` as in `WindowedSampler`; `max_staleness` is 0."""
        super().__init__(max_staleness=0, gated=gated, abort_stale=abort_stale)


class InOrderSampler(_Windowed):
    """Trains groups in ascending order of id: a group trains only if every group with a lower id
    has been trained or filtered, or trains in the same step.

    Steps are deterministic: the groups that a step trains, and the weights that sampled them,
    depend only on the prompts and the recipe's rejections, not on the order in which engines
    finish. Groups start by ascending id, and engines get new weights only once all groups that may
    start are complete (`drains`), including replacements of rejected ones. So no group has tokens
    of two versions. The price is that engines wait for the slowest group of every version.

    No group exceeds `max_staleness`, so none is evicted. While engines serve version r, at most
    (lookahead + r + 1) x groups_per_step groups of the run are accepted, and groups that start
    later have higher ids. A step takes groups_per_step groups in order and makes one version, so
    the last accepted group trains at version lookahead + r.

    Example: `InOrderSampler(lookahead=1)`.
    """

    name = "in_order"
    drains = True

    def __init__(self, lookahead: int) -> None:
        """Take `lookahead`, the number of future steps whose groups may start early.

        Raises:
            SettingsError: `lookahead` is not an int, or is below 0.
        """
        super().__init__("lookahead", lookahead)

    def select(self, ready: Ready, *, version: int, count: int) -> Sequence[Held]:
        """Return up to `count` ready groups with the lowest ids. All ids must be below that of the
        first group that is not complete.
        """
        del version
        limit = ready.lowest_unfinished
        first = heapq.nsmallest(count, ready, key=lambda group: group.id)
        return list(itertools.takewhile(lambda group: limit is None or group.id < limit, first))

    def evict(self, ready: Ready, *, version: int) -> Sequence[Held]:
        """Return no group, because no group can become older than `lookahead` versions."""
        del ready, version
        return ()


_KNOWN: dict[str, type[Sampler]] = {
    sampler_type.name: sampler_type
    for sampler_type in (WindowedSampler, StrictSampler, FirstReadySampler, InOrderSampler)
}


def load_sampler(name_or_path: str, **options: Any) -> Sampler:
    """Make a sampler by its name, `windowed`, `strict`, `first_ready` or `in_order`, or by
    `package.module:Class`.

    `options` are its constructor's arguments. A custom class needs the attributes and methods of
    `protocol.Sampler`, but no base class.

    Raises:
        SettingsError: the name or an option is unknown, an option is missing, or the class cannot
            be imported or is not a sampler.

    Example: `load_sampler("windowed", max_staleness=2, order="oldest")`.
    """
    built_in = _KNOWN.get(name_or_path)
    build = built_in or _imported(name_or_path)
    signature = inspect.signature(build)
    try:
        signature.bind(**options)
    except TypeError as error:
        allowed = ", ".join(map(str, signature.parameters.values())) or "none"
        raise SettingsError(f"sampler {name_or_path}: {error}; its options: {allowed}") from error
    try:
        sampler: Sampler = build(**options)
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(
            f"sampler {name_or_path} cannot be made with {options}: it raised {error!r}"
        ) from error
    if built_in is None and (wrong := _wrong_with(sampler)):
        raise SettingsError(f"sampler {name_or_path!r} {wrong}")
    return sampler


def configured_sampler(
    name_or_path: str, *, window: int, order: str, gated: bool, abort_stale: bool
) -> Sampler:
    """Make a sampler by name or path, with options from a run's configuration. A built-in sampler
    gets only the options that its constructor has; a custom sampler gets none.

    `window` is the `max_staleness` of `windowed` and the `lookahead` of `in_order`. See
    `load_sampler`.
    """
    admission = {"gated": gated, "abort_stale": abort_stale}
    options: dict[str, dict[str, Any]] = {
        "strict": admission,
        "windowed": {"max_staleness": window, "order": order, **admission},
        "in_order": {"lookahead": window},
    }
    return load_sampler(name_or_path, **options.get(name_or_path, {}))


def _imported(path: str) -> Callable[..., Any]:
    module_name, _, attribute = path.partition(":")
    if not (module_name and attribute):
        raise SettingsError(
            f"sampler is {path!r}; allowed: {', '.join(sorted(_KNOWN))}, or package.module:Class"
        )
    return import_named(path, "sampler")


def _wrong_with(sampler: Any) -> str:
    """Return a text on what a custom sampler lacks, or has with a wrong type or value, compared
    with `protocol.Sampler`; empty if the sampler is valid.
    """
    parts = [part for part in vars(Sampler) if not part.startswith("_")]
    missing = [part for part in parts if not hasattr(sampler, part)]
    methods = [part for part in parts if inspect.isfunction(getattr(Sampler, part))]
    missing += [m for m in methods if m not in missing and not callable(getattr(sampler, m))]
    if missing:
        return (
            f"is no sampler: it has no {', '.join(missing)}; see "
            "megatron_idempotent.rl.controller.protocol.Sampler"
        )
    window = sampler.max_staleness
    if not (isinstance(sampler.name, str) and sampler.name):
        return f"has name {sampler.name!r}; allowed: a string"
    if window is not None and (type(window) is not int or window < 0):
        return f"has max_staleness {window!r}; allowed: 0 or more versions, or None"
    if type(sampler.drains) is not bool:
        return f"has drains {sampler.drains!r}; allowed: a bool"
    return ""
