"""Samplers by name, and custom ones by import path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from megatron_idempotent.controller.errors import SettingsError
from megatron_idempotent.controller.protocol import Sampler

from .first_ready import FirstReadySampler
from .in_order import InOrderSampler
from .windowed import StrictSampler, WindowedSampler

_KNOWN: dict[str, type[Sampler]] = {
    each.name: each for each in (WindowedSampler, StrictSampler, FirstReadySampler, InOrderSampler)
}
_METHODS = ("required_capacity", "room", "select", "evict")


def load_sampler(name_or_path: str, **options: Any) -> Sampler:
    """A sampler: `windowed`, `strict`, `first_ready`, `in_order`, or `package.module:Class`.

    `options` are its constructor's arguments. A custom class is anything with the attributes and
    methods of `protocol.Sampler`; it inherits nothing.
    Example: `load_sampler("windowed", max_staleness=2, order="oldest")`.
    Errors: `SettingsError` for an unknown name or option, one that is missing, a class that cannot
        be imported, or one that is no sampler.
    """
    build = _KNOWN[name_or_path] if name_or_path in _KNOWN else _imported(name_or_path)
    _check_options(name_or_path, build, options)
    try:
        sampler = build(**options)
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(f"sampler {name_or_path} cannot be made: {error!r}") from error
    if name_or_path not in _KNOWN:
        _check_sampler(name_or_path, sampler)
    return sampler


def _imported(path: str) -> Callable[..., Any]:
    module_name, colon, attribute = path.partition(":")
    if not (colon and module_name and attribute):
        raise SettingsError(
            f"sampler is {path!r}; allowed: {', '.join(sorted(_KNOWN))}, or package.module:Class"
        )
    try:
        build = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"sampler {path!r} cannot be imported: {error}") from error
    if not callable(build):
        raise SettingsError(f"sampler {path!r} is a {type(build).__name__}; give a class")
    return build  # type: ignore[no-any-return]


def _check_options(name: str, build: Callable[..., Any], options: dict[str, Any]) -> None:
    signature = inspect.signature(build)
    try:
        signature.bind(**options)
    except TypeError as error:
        known = ", ".join(map(str, signature.parameters.values())) or "none"
        raise SettingsError(f"sampler {name}: {error}; its options: {known}") from error


def _check_sampler(path: str, sampler: Any) -> None:
    """Checks that a sampler has the protocol's parts, with its arguments and types."""
    parts = [part for part in vars(Sampler) if not part.startswith("_")]
    missing = [part for part in parts if not hasattr(sampler, part)]
    missing += [m for m in _METHODS if m not in missing and not callable(getattr(sampler, m))]
    if missing:
        raise SettingsError(
            f"sampler {path!r} is no sampler: it has no {', '.join(missing)}; see "
            "megatron_idempotent.controller.protocol.Sampler"
        )
    for method in _METHODS:
        _check_arguments(path, method, getattr(sampler, method))
    window = sampler.max_staleness
    if not (isinstance(sampler.name, str) and sampler.name):
        raise SettingsError(f"sampler {path!r} has name {sampler.name!r}; allowed: a string")
    if window is not None and (type(window) is not int or window < 0):
        raise SettingsError(
            f"sampler {path!r} has max_staleness {window!r}; allowed: 0 or more versions, or None"
        )
    if type(sampler.drains) is not bool:
        raise SettingsError(f"sampler {path!r} has drains {sampler.drains!r}; allowed: a bool")


def _check_arguments(path: str, method: str, bound: Callable[..., Any]) -> None:
    wanted = list(inspect.signature(getattr(Sampler, method)).parameters.values())[1:]  # no self
    positional = [each.name for each in wanted if each.kind is each.POSITIONAL_OR_KEYWORD]
    named = {each.name: None for each in wanted if each.kind is each.KEYWORD_ONLY}
    try:
        inspect.signature(bound).bind(*positional, **named)
    except TypeError as error:
        raise SettingsError(
            f"sampler {path!r}: {method} is called with ({', '.join(positional + list(named))}), "
            f"the last {len(named)} by name, and {error}"
        ) from error
