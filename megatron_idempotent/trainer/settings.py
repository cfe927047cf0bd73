"""From a TOML file and `--set section.key=value` to a `Config`. An unknown key is an error."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomllib

from megatron_idempotent.trainer.config import Config
from megatron_idempotent.trainer.errors import ConfigError
from megatron_idempotent.trainer.setting import kind_of

SECTIONS: dict[str, Any] = {
    field.name: field.default_factory for field in dataclasses.fields(Config)
}
"""The class of each section, by its name."""

DEFAULT_FILE = Path(__file__).with_name("default.toml")
ASYNC_FILE = Path(__file__).with_name("async.toml")


def load_config(path: Path = DEFAULT_FILE, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the file, with `section.key=value` overrides applied in order.

    Errors: `ConfigError` naming the file, or the key, its value and the allowed range.
    """
    values = read_toml(path)
    for override in overrides:
        section, key, value = parse_override(override)
        values.setdefault(section, {})[key] = value
    return build_config(values)


def read_toml(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a TOML file, unchecked except that each one is a table."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a TOML file with --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    for name, section in content.items():
        if not isinstance(section, dict):
            _known(name, SECTIONS, "section")
            raise ConfigError(f"{path}: {name} is {section!r}; write it as a table, [{name}]")
    return content


def build_config(values: Mapping[str, Mapping[str, Any]]) -> Config:
    """A checked `Config`; sections and keys that are absent keep their defaults."""
    sections = {}
    for name, section in values.items():
        _known(name, SECTIONS, "section")
        keys = {field.name for field in dataclasses.fields(SECTIONS[name])}
        for key, value in section.items():
            _known(key, keys, "key", f"{name}.", value)
        sections[name] = SECTIONS[name](**section)
    return Config(**sections)


def parse_override(text: str) -> tuple[str, str, Any]:
    """`"optimizer.lr=3e-4"` as section, key and a value of the key's own type."""
    path, equals, raw = text.partition("=")
    section, dot, key = path.strip().partition(".")
    if not equals or not dot:
        raise ConfigError(f"--set {text!r}; write --set section.key=value")
    _known(section, SECTIONS, "section")
    fields = {field.name: field for field in dataclasses.fields(SECTIONS[section])}
    _known(key, fields, "key", f"{section}.", raw)
    return section, key, _parse_value(raw.strip(), fields[key], f"{section}.{key}")


def as_toml(config: Config) -> str:
    """The configuration as TOML that `load_config` reads back to an equal one."""
    lines = []
    for name in SECTIONS:
        lines.append(f"[{name}]")
        for key, value in dataclasses.asdict(getattr(config, name)).items():
            lines.append(f"{key} = {_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: str | float) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)


def _parse_value(raw: str, field: dataclasses.Field[Any], name: str) -> Any:
    kind = kind_of(field)
    if kind is bool:
        if raw.lower() not in ("true", "false"):
            raise ConfigError(f"{name} is {raw!r}; allowed: true or false")
        return raw.lower() == "true"
    try:
        return kind(raw)
    except ValueError as error:
        raise ConfigError(
            f"{name} is {raw!r}; give a {kind.__name__}, {field.metadata['allowed'].describe()}"
        ) from error


def _known(
    name: str, known: Iterable[str], what: str, prefix: str = "", value: object = None
) -> None:
    names = sorted(known)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(names)}"
    given = "" if value is None else f" (value {value!r})"
    raise ConfigError(f"unknown {what} {prefix}{name}{given}; {hint}")
