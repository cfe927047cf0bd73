"""Makes settings: frozen dataclasses that check themselves, built in code or read from TOML.

pydantic checks types and ranges. This module says what is wrong in the words of the settings: the
key, its value, what is allowed, the nearest known key, and the line of the file.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

try:
    import pydantic.dataclasses
    from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
    from typing_extensions import dataclass_transform
except ImportError as missing:
    raise ModuleNotFoundError(
        f"settings are checked by pydantic 2.11 or newer ({missing}): "
        "pip install 'megatron-idempotent[controller]'",
        name="pydantic",
    ) from missing

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Field too: who imports it from here is told which extra brings pydantic.
__all__ = ["Field", "SettingsReader", "allowed", "schema", "settings"]

Record = TypeVar("Record")
Place = tuple[str, ...]
"""A path to a value: keys from the outermost table on, such as `("optimizer", "lr")`."""

_CHECKED = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
)


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(Field, dataclasses.field)
)
def settings(error: type[ValueError], prefix: str = "") -> Callable[[type[Record]], type[Record]]:
    """Make a class a frozen, keyword-only dataclass whose fields are checked when it is built.

    A field's range is written as `Field(default=2, ge=1)`, and the string under it documents it. A
    `__post_init__` that raises a ValueError checks several fields together. One `error` lists all
    wrong fields and unknown keywords, with `prefix` before their names.
    Example: `@settings(ConfigError, "optimizer.")`.
    """

    def decorate(cls: type[Record]) -> type[Record]:
        # Without kw_only, which makes pydantic sort the fields: `checked` takes keywords only.
        made: Any = pydantic.dataclasses.dataclass(frozen=True, slots=True, config=_CHECKED)(cls)
        build = made.__init__
        for base in cls.__mro__[1:]:  # pydantic takes descriptions from the class's own source
            for name, inherited in vars(base).get("__pydantic_fields__", {}).items():
                field = made.__pydantic_fields__[name]
                field.description = field.description or inherited.description

        @functools.wraps(build)
        def checked(self: Any, **values: Any) -> None:
            try:
                build(self, **values)
            except ValidationError as found:
                told = [text for _, text in _problems(found, made, prefix)]
                raise error("\n".join(told)) from None

        made.__init__ = checked
        # pydantic would build this schema into records that have this one as a field. Its parts
        # refer to the whole, and cloudpickle could not load such a record of a package pickled by
        # value.
        del made.__pydantic_core_schema__
        return cast("type[Record]", made)

    return decorate


class SettingsReader(Generic[Record]):
    """Reads a record from a TOML file, with texts `key=value` applied over it.

    Example: `SettingsReader(Config, ConfigError, path).set("optimizer.lr=1e-4").build()`.
    """

    def __init__(
        self, kind: type[Record], error: type[ValueError], path: Path | None = None
    ) -> None:
        """Read the file, unless `path` is None. Errors: `error`, which names the file.

        `kind` is the class of the record, and `error` the class of all errors.
        """
        self.table: dict[str, Any] = {}
        """The values given so far, as nested tables."""
        self._error, self._path = error, path
        self._kind: Any = kind
        self._lines: Mapping[Place, int] = {}
        self._set: set[Place] = set()
        if path is None:
            return
        try:
            text = path.read_text(encoding="utf-8")
            self.table = tomllib.loads(text)
        except OSError as failed:
            raise error(f"{path}: {failed.strerror}; give a TOML file") from failed
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failed:
            raise error(f"{path}: not TOML: {failed}; correct the file") from failed
        self._lines = dict(_lines(text))

    def set(self, *texts: str) -> SettingsReader[Record]:
        """Apply texts `key=value` or `section.key=value`, in order; return this reader.

        A value is TOML, or a string without quotes. Errors: `error` for a text of another form.
        """
        for text in texts:
            path, equals, raw = text.partition("=")
            place = tuple(part.strip() for part in path.split("."))
            if not equals or not all(place):
                raise self._error(f"--set {_shown(text)}; write key=value, or section.key=value")
            table = self.table
            for part in place[:-1]:
                table = table.setdefault(part, {})
                if not isinstance(table, dict):
                    raise self._error(
                        f"--set {_shown(text)}: {part} is {_shown(table)}, and no section; "
                        f"write {part}=value"
                    )
            table[place[-1]] = _value(raw.strip(), _at(self._kind, place))
            self._set.add(place)
        return self

    def build(self, under: Mapping[str, Mapping[str, Any]] | None = None) -> Record:
        """Build the record; a key that was not given has its value in `under`, or its default.

        `under` has values by section and key. Errors: `error`, with a line for each fault.
        """
        table = self.table
        for section, values in (under or {}).items():
            given = table.get(section, {})
            if isinstance(given, dict):
                table = {**table, section: {**values, **given}}
        try:
            # As JSON: a table may then be a record, and no other type is converted.
            record = _adapter(self._kind).validate_json(json.dumps(table, default=str))
        except ValidationError as found:
            told = [self._where(place) + text for place, text in _problems(found, self._kind, "")]
            raise self._error("\n".join(told)) from None
        return cast("Record", record)

    def _where(self, place: Place) -> str:
        """Return `file:line: ` for a key of the file, and "" for a key that was set over it."""
        n = len(place)
        if self._path is None or any(each[:n] == place[: len(each)] for each in self._set):
            return ""
        line = self._lines.get(place)
        return f"{self._path}:{line}: " if line else f"{self._path}: "


@functools.cache
def schema(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a record, with the docstrings of its fields; do not change it."""
    return _adapter(kind).json_schema()


def allowed(field: Mapping[str, Any]) -> str:
    """Say in words what a field may be, from its JSON schema: `above 0, up to 1`."""
    if "enum" in field or "const" in field:
        return " or ".join(map(str, field.get("enum", [field.get("const")])))
    if field.get("type") == "boolean":
        return "true or false"
    low, high = field.get("minimum"), field.get("maximum")
    above, below = field.get("exclusiveMinimum"), field.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f"{low:.10g} to {high:.10g}"
    bounds = [
        form.format(bound)
        for form, bound in (
            ("above {:.10g}", above),
            ("{:.10g} or more", low),
            ("up to {:.10g}", high),
            ("below {:.10g}", below),
        )
        if bound is not None
    ]
    return ", ".join(bounds) or "any"


_TYPES = {"integer": "a whole number", "number": "a number", "string": "text"}


def _problems(found: ValidationError, kind: Any, prefix: str) -> Iterator[tuple[Place, str]]:
    """Yield the place of each fault that pydantic found, and a sentence about it."""
    for each in found.errors(include_url=False):
        place = tuple(map(str, each["loc"]))
        field = _at(kind, place)
        name, value, what = prefix + ".".join(place), _shown(each["input"]), each["type"]
        if what == "value_error":  # a record's own check names what is wrong in it
            text = str(each["ctx"]["error"])
            # A check that a record inherits names its keys without the section.
            yield place, text if text.startswith(name) else f"{name.rstrip('.')}.{text}"
        elif what == "unexpected_keyword_argument":
            siblings = _at(kind, place[:-1]).get("properties", {})
            yield place, _unknown(kind, place, prefix, each["input"], siblings)
        elif what == "missing":
            yield place, f"{name} is missing; give {_TYPES.get(field.get('type', ''), 'it')}"
        elif field.get("type") == "object":
            yield place, f"{name} is {value}; write it as a table, [{name}]"
        elif what.endswith("_type") and field.get("type") in _TYPES:
            also = "" if allowed(field) == "any" else f", {allowed(field)}"
            yield place, f"{name} is {value}; give {_TYPES[field['type']]}{also}"
        else:
            yield place, f"{name} is {value}; allowed: {allowed(field)}"


def _shown(value: object) -> str:
    """Return a value as a message has it; a URL may hold a password, or a query that signs it."""
    return "not shown: a URL may hold secrets" if "://" in repr(value) else repr(value)


def _unknown(kind: Any, place: Place, prefix: str, value: object, siblings: Iterable[str]) -> str:
    *section, key = place
    name = prefix + ".".join(place)
    near = difflib.get_close_matches(key, siblings, n=1)
    hints = [".".join((*section, each)) for each in near]
    hints += [".".join(each) for each in _keys(kind) if each[-1] == key]
    hint = f"did you mean {prefix}{hints[0]}?" if hints else f"known: {', '.join(siblings)}"
    if isinstance(value, dict):
        return f"unknown section {name}; {hint}"
    return f"unknown key {name} (value {_shown(value)}); {hint}"


def _keys(kind: Any) -> Iterator[Place]:
    """Yield the keys of a record and of its sections, as places."""
    for key in schema(kind)["properties"]:
        yield (key,)
        yield from ((key, each) for each in _at(kind, (key,)).get("properties", {}))


def _at(kind: Any, place: Place) -> Mapping[str, Any]:
    """Return the JSON schema of the value at a place; empty for one that no record has."""
    root = schema(kind)
    field = root
    for key in place:
        field = field.get("properties", {}).get(key, {})
        while "$ref" in field:
            field = root["$defs"].get(field["$ref"].rpartition("/")[2], {})
    return field


def _value(raw: str, field: Mapping[str, Any]) -> Any:
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw
    # A directory may be called 123.
    return raw if field.get("type") == "string" and not isinstance(value, str) else value


def _lines(text: str) -> Iterator[tuple[Place, int]]:
    """Yield the place of each key and table in a TOML file, with its line, from 1."""
    table: Place = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\[?\s*([\w.-]+)\s*\]", line):
            table = tuple(header[1].split("."))
            yield table, number
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            yield (*table, *key[1].split(".")), number


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
