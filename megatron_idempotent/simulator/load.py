"""From TOML and `--set key=value` to a `Scenario`. An unknown key is an error."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .faults import Fault
from .latency import Distribution, distribution
from .scenario import Scenario

Record = TypeVar("Record")


class ScenarioError(ValueError):
    """A scenario that cannot be read; the message names the file or key, and what is allowed."""


def load_scenario(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario in a file, with `key=value` or `section.key=value` applied in order.

    Errors: `ScenarioError`, and `SettingsError` for what a controller could not run.
    """
    import tomllib  # from Python 3.11 on

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: not TOML: {error}") from error
    table.setdefault("name", path.stem)
    return build_scenario(override(table, overrides))


def override(table: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The table with `key=value` set; values are TOML, and words without quotes are strings."""
    import tomllib

    changed: dict[str, Any] = _copied(table)
    for text in overrides:
        path, equals, raw = text.partition("=")
        if not equals:
            raise ScenarioError(f"{text!r}; write key=value, such as engine.slots=32")
        *sections, key = path.strip().split(".")
        place = changed
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ScenarioError(f"{path}: {section} is {place!r}, not a section")
        try:
            place[key] = tomllib.loads(f"value = {raw}")["value"]
        except tomllib.TOMLDecodeError:
            place[key] = raw.strip()
    return changed


def build_scenario(table: Mapping[str, Any]) -> Scenario:
    """A checked `Scenario`; keys that are absent keep their defaults. Errors: `ScenarioError`."""
    scenario = _build(Scenario, table, "")
    try:
        scenario.settings().checked_capacity(scenario.make_sampler())
    except ValueError as error:
        raise ScenarioError(str(error)) from error
    return scenario


def _build(record: type[Record], table: Mapping[str, Any], where: str) -> Record:
    kinds = typing.get_type_hints(record)
    values = {}
    for key, value in table.items():
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            hint = f"did you mean {where}{near[0]}?" if near else f"known: {', '.join(kinds)}"
            raise ScenarioError(f"unknown key {where}{key}; {hint}")
        values[key] = _value(kinds[key], value, f"{where}{key}")
    try:
        return record(**values)
    except (TypeError, ValueError) as error:
        raise ScenarioError(str(error)) from error


def _value(kind: Any, value: Any, name: str) -> Any:
    if kind is Distribution:
        try:
            return distribution(value, name)
        except ValueError as error:
            raise ScenarioError(str(error)) from error
    if kind == tuple[Fault, ...]:
        if not isinstance(value, list):
            raise ScenarioError(f"{name} is {value!r}; write each as a table, [[{name}]]")
        return tuple(_build(Fault, each, f"{name}.") for each in value)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ScenarioError(f"{name} is {value!r}; write it as a table, [{name}]")
        return _build(typing.cast("type[Any]", kind), value, f"{name}.")
    allowed = typing.get_args(kind) or None
    if allowed:
        if value not in allowed:
            raise ScenarioError(f"{name} is {value!r}; allowed: {', '.join(map(str, allowed))}")
        return value
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ScenarioError(f"{name} is {value!r}; give {_A[kind]}")
    return value


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


_A = {int: "a whole number", float: "a number", str: "a word"}
