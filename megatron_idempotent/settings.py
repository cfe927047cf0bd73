"""Makes settings: frozen dataclasses that check themselves, built in code or read from TOML.

pydantic checks types and ranges. This module writes the error messages: the key, its value, what is
allowed, the most similar key, and the line of the file.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import operator
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

# With Field, so that its importers get the error above, which names the extra for pydantic.
__all__ = ["MAY_CHANGE", "Field", "SettingsReader", "allowed", "refused", "schema", "settings"]

MAY_CHANGE: dict[str, Any] = {"may_change": True}
"""`Field(json_schema_extra=MAY_CHANGE)` declares that a resumed run may change the field, because
it affects no number."""

Record = TypeVar("Record")
KeyPath = tuple[str, ...]
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
    `__post_init__` that raises a ValueError checks several fields together. A wrong value or an
    unknown keyword raises an `error`, which lists all faults, with `prefix` before the names.
    Example: `@settings(ConfigError, "optimizer.")`.
    """

    def decorate(cls: type[Record]) -> type[Record]:
        # Without kw_only, which makes pydantic sort the fields: `checked` takes keywords only.
        record: Any = pydantic.dataclasses.dataclass(frozen=True, slots=True, config=_CHECKED)(cls)
        build = record.__init__
        for base in cls.__mro__[1:]:  # pydantic takes descriptions from the class's own source
            for name, inherited in vars(base).get("__pydantic_fields__", {}).items():
                field = record.__pydantic_fields__[name]
                field.description = field.description or inherited.description

        @functools.wraps(build)
        def checked(self: Any, **values: Any) -> None:
            try:
                build(self, **values)
            except ValidationError as faults:
                sentences = [text for _, text in _problems(faults, record, prefix)]
                raise error("\n".join(sentences)) from None

        record.__init__ = checked
        # pydantic would copy this schema, whose parts refer to it, into records that have this one
        # as a field; cloudpickle could not load such records of a package pickled by value.
        del record.__pydantic_core_schema__
        return cast("type[Record]", record)

    return decorate


def refused(record: Any, *keys: str, allowed: str) -> ValueError:
    """Return the `ValueError` that a `__post_init__` raises if several fields do not fit together.
    Its message has the fields, their values, and what is allowed.

    Args:
        record: the record of settings.
        keys: the fields: "pp", or "parallel.pp" for a field of a record in this one. The message
            gets the section of `record`, if it has one, before the first key.
        allowed: what is allowed in the place of these values.

    Example: `raise refused(self, "vpp", "pp", allowed="2 or more stages, or vpp = 1")`.
    """
    values = [operator.attrgetter(key)(record) for key in keys]
    facts = [
        f"{key} is {str(value).lower() if isinstance(value, bool) else repr(value)}"
        for key, value in zip(keys, values, strict=True)
    ]
    return ValueError(f"{' and '.join(facts)}; allowed: {allowed}")


class SettingsReader(Generic[Record]):
    """Builds a record (an instance of a class made by `settings`) from a TOML file, and from texts
    `key=value` that override the file.

    Example: `SettingsReader(Config, ConfigError, path).set("optimizer.lr=1e-4").build()`.
    """

    def __init__(
        self, kind: type[Record], error: type[ValueError], path: Path | None = None
    ) -> None:
        """Read the TOML file at `path`; if `path` is None, begin with no settings.

        Args:
            kind: the class of the record.
            error: the class of all errors.
            path: the file.

        Raises:
            error: the file cannot be read, or is not TOML; the message names it.
        """
        self.table: dict[str, Any] = {}
        """The values given so far, as nested tables."""
        self._error, self._path = error, path
        self._kind: Any = kind
        self._lines: Mapping[KeyPath, int] = {}
        self._set: set[KeyPath] = set()
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

        A value is TOML, or a string without quotes.

        Raises:
            error: a text has another form.
        """
        for text in texts:
            path, equals, raw = text.partition("=")
            key_path = tuple(part.strip() for part in path.split("."))
            if not equals or not all(key_path):
                raise self._error(f"--set {_quoted(text)}; write key=value, or section.key=value")
            table = self.table
            for part in key_path[:-1]:
                table = table.setdefault(part, {})
                if not isinstance(table, dict):
                    raise self._error(
                        f"--set {_quoted(text)}: {part} is {_quoted(table)}, and no section; "
                        f"write {part}=value"
                    )
            table[key_path[-1]] = _value(raw.strip(), _schema_of(self._kind, key_path))
            self._set.add(key_path)
        return self

    def build(self, under: Mapping[str, Mapping[str, Any]] | None = None) -> Record:
        """Build the record of settings out of the file and the `key=value` texts given to `set`.

        Args:
            under: values, by section and key, of keys that neither has; other keys have defaults.

        Raises:
            error: a value or a key is wrong; the message has a line for each fault.
        """
        table = self.table
        for section, values in (under or {}).items():
            own_values = table.get(section, {})
            if isinstance(own_values, dict):
                table = {**table, section: {**values, **own_values}}
        try:
            # As JSON, from which pydantic converts tables to records, and nothing else.
            record = _adapter(self._kind).validate_json(json.dumps(table, default=str))
        except ValidationError as faults:
            problems = _problems(faults, self._kind, "")
            raise self._error(
                "\n".join(self._line(path) + text for path, text in problems)
            ) from None
        return cast("Record", record)

    def _line(self, key_path: KeyPath) -> str:
        """Return `file:line: `, the place of a key in the settings file.
        Return "" for a key that `set` has given a value.
        """
        n = len(key_path)
        if self._path is None or any(path[:n] == key_path[: len(path)] for path in self._set):
            return ""
        line = self._lines.get(key_path)
        return f"{self._path}:{line}: " if line else f"{self._path}: "


@functools.cache
def schema(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a settings class, with the docstrings of its fields. The dict is
    cached: do not change it.
    """
    return _adapter(kind).json_schema()


def allowed(field: Mapping[str, Any]) -> str:
    """Return the values that a field allows, in words, from its JSON schema: `above 0, up to 1`."""
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


def _problems(faults: ValidationError, kind: Any, prefix: str) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key, a sentence about what is wrong) for each fault that pydantic found."""
    for fault in faults.errors(include_url=False):
        key_path = tuple(map(str, fault["loc"]))
        field = _schema_of(kind, key_path)
        name, value, reason = prefix + ".".join(key_path), _quoted(fault["input"]), fault["type"]
        if reason == "value_error":  # a record's own check names what is wrong in it
            text = str(fault["ctx"]["error"])
            # A check that a record inherits names its keys without the section.
            yield key_path, text if text.startswith(name) else f"{name.rstrip('.')}.{text}"
        elif reason == "unexpected_keyword_argument":
            siblings = _schema_of(kind, key_path[:-1]).get("properties", {})
            yield key_path, _unknown(kind, key_path, prefix, fault["input"], siblings)
        elif reason == "missing":
            yield key_path, f"{name} is missing; give {_TYPES.get(field.get('type', ''), 'it')}"
        elif field.get("type") == "object":
            yield key_path, f"{name} is {value}; write it as a table, [{name}]"
        elif reason.endswith("_type") and field.get("type") in _TYPES:
            also = "" if allowed(field) == "any" else f", {allowed(field)}"
            yield key_path, f"{name} is {value}; give {_TYPES[field['type']]}{also}"
        else:
            yield key_path, f"{name} is {value}; allowed: {allowed(field)}"


def _quoted(value: object) -> str:
    """Return a value as text for a message.
    For a text with a URL return a note instead, because the URL may hold a password or a signature.
    """
    return "not shown: a URL may hold secrets" if "://" in repr(value) else repr(value)


def _unknown(
    kind: Any, key_path: KeyPath, prefix: str, value: object, siblings: Iterable[str]
) -> str:
    *section, key = key_path
    name = prefix + ".".join(key_path)
    near = difflib.get_close_matches(key, siblings, n=1)
    hints = [".".join((*section, sibling)) for sibling in near]
    hints += [".".join(path) for path in _keys(kind) if path[-1] == key]
    hint = f"did you mean {prefix}{hints[0]}?" if hints else f"known: {', '.join(siblings)}"
    if isinstance(value, dict):
        return f"unknown section {name}; {hint}"
    return f"unknown key {name} (value {_quoted(value)}); {hint}"


def _keys(kind: Any) -> Iterator[KeyPath]:
    """Yield the key of each field of a settings class, as (key,), and of each field of its
    sections, as (section, key).
    """
    for key in schema(kind)["properties"]:
        yield (key,)
        yield from ((key, inner) for inner in _schema_of(kind, (key,)).get("properties", {}))


def _schema_of(kind: Any, key_path: KeyPath) -> Mapping[str, Any]:
    """Return the JSON schema of a field's value, by the field's key; empty if the settings class
    has no such key.
    """
    root = schema(kind)
    field = root
    for key in key_path:
        field = field.get("properties", {}).get(key, {})
        while "$ref" in field:
            field = root["$defs"].get(field["$ref"].rpartition("/")[2], {})
    return field


def _value(raw: str, field: Mapping[str, Any]) -> Any:
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw
    # A folder may be called 123.
    return raw if field.get("type") == "string" and not isinstance(value, str) else value


def _lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    """Yield (key or table, line number from 1) for each key and table of a TOML file."""
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\[?\s*([\w.-]+)\s*\]", line):
            table = tuple(header[1].split("."))
            yield table, number
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            yield (*table, *key[1].split(".")), number


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
