"""Defines frozen records, on which all of this package stands, and the errors that users see.

A `Record` does what `@dataclass(frozen=True, kw_only=True)` does, without importing `dataclasses`:
with the `inspect`, `ast` and `tokenize` that it imports, that takes longer than all of `apply()`.
Each message of an error carries the fact and the remedy.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar, dataclass_transform
else:  # it speaks to type checkers only

    def dataclass_transform(**_: Any) -> Any:
        return lambda cls: cls


NOTHING: Mapping[Any, Any] = type(vars(object))({})
"""An empty mapping, for a default: `types.MappingProxyType` without its module."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Record:
    """Makes the annotated names of a subclass its fields, frozen and given by keyword.

    Example:
        class Point(Record):
            x: int
            y: int = 0
        Point(x=1)
    """

    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls._fields = (*cls._fields, *cls.__annotations__)

    def __init__(self, **values: Any) -> None:
        kind = type(self)
        for name in self._fields:
            if name in values:
                self.__dict__[name] = values.pop(name)
            elif hasattr(kind, name):
                self.__dict__[name] = getattr(kind, name)
            else:
                raise TypeError(f"{kind.__name__} needs {name}=")
        if values:
            raise TypeError(
                f"{kind.__name__} has no field {next(iter(values))!r}: it has "
                + ", ".join(self._fields)
            )
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check the values; subclasses override it."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: cannot set {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: cannot delete {name}")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__[name] for name in self._fields))

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={self.__dict__[name]!r}" for name in self._fields)
        return f"{type(self).__name__}({inner})"


class PatchError(RuntimeError):
    """A patch that was asked for by name, or any patch in strict mode, could not be applied."""


class UnknownPatchError(ValueError):
    """A patch id in `only=`, `exclude=` or the environment is in no case file."""


class Conflict(Exception):
    """Somebody else's object stands in place of upstream's function; becomes a row's reason."""


class VerificationError(RuntimeError):
    """A patch is no longer in place, or the ranks of a group are patched differently."""
