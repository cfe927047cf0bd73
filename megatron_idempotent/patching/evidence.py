"""Searches upstream's code for evidence that a hazard has been repaired.

A fragment that a body contains is evidence. A fragment that one body lacks is not: upstream may
have moved it into a function that the body calls. So a fragment counts as removed only if the
modules of the bodies lack it, and so do the functions of other modules that the bodies call,
directly or through each other.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from .base import Place
from .moved import called
from .source import Body, nodes_of, occurrences

if TYPE_CHECKING:
    from .releases import Sources


class Bodies(dict[str, Body]):
    """Maps the address of each target function to the function's body. Its method `lack` tells if
    the code around these functions is without a source fragment.

    Args:
        bodies: the bodies by target address.
        sources: the sources of the bodies; None to search no function in another module.
    """

    def __init__(
        self,
        bodies: Mapping[str, Body] | Iterable[tuple[str, Body]] = (),
        sources: Sources | None = None,
    ) -> None:
        super().__init__(bodies)
        self._sources = sources

    def lack(self, fragment: str) -> bool:
        """Return True if the fragment is found nowhere: neither in the modules that contain the
        bodies, nor in functions of other modules that the bodies call.
        """
        # On a Megatron with the hazard a body mostly has the fragment: then no more is parsed.
        if any(body.contains(fragment) for body in self.values()):
            return False
        if any(_module_contains(text, fragment) for text in {b.module for b in self.values()}):
            return False
        if self._sources is None:
            return True
        return not any(
            callee.contains(fragment)
            for address, body in self.items()
            for _, callee in called(
                body,
                Place(address=address).module,
                self._sources,
                lambda text: _may_contain(text, fragment),
            )
        )


def a_body_has(*fragments: str, outside_loops: bool = False) -> Callable[[Bodies], bool]:
    """Return a function for `Patch.fixed_when`. It returns True if one of the target functions'
    bodies contains one of the fragments; with `outside_loops`, only code that is not in a loop is
    searched.
    """
    return lambda bodies: any(
        body.contains(fragment, outside_loops=outside_loops)
        for body in bodies.values()
        for fragment in fragments
    )


def no_body_has(fragment: str) -> Callable[[Bodies], bool]:
    """Return a function for `Patch.fixed_when`. It returns True if the fragment is neither in the
    modules of the target functions, nor in functions of other modules that these functions call.
    """
    return lambda bodies: bodies.lack(fragment)


def _may_contain(text: str, fragment: str) -> bool:
    """Return whether a text has all the names that a fragment has. If not, it cannot contain the
    fragment, and need not be parsed.
    """
    return all(word in text for word in _names(fragment))


@lru_cache(maxsize=64)
def _names(fragment: str) -> frozenset[str]:
    nodes = ast.walk(ast.parse(fragment))
    words = (getattr(node, part, None) for node in nodes for part in ("id", "attr", "arg"))
    return frozenset(word for word in words if isinstance(word, str))


def _module_contains(text: str, fragment: str) -> bool:
    """Tell if a module's source contains the code of a fragment."""
    parts = _parts(text, lambda part: _may_contain(part, fragment))
    return any(occurrences(nodes_of(part), fragment) for part in parts)


def _parts(text: str, worth: Callable[[str], bool]) -> Iterator[ast.Module]:
    """Split a module's source at its top-level definitions. Parse and yield those parts for whose
    text `worth` returns True.
    """
    if not worth(text):
        return
    starts = [
        0,
        *(definition_start.start() for definition_start in _DEFINITION.finditer(text)),
        len(text),
    ]
    parts = [text[start:end] for start, end in itertools.pairwise(starts)]
    try:
        parsed = [ast.parse(part) for part in parts if worth(part)]
    except SyntaxError:  # the beginning of a "definition" is in a multi-line string
        parsed = [ast.parse(text)]
    yield from parsed


#: The beginning of a top-level definition, or of a decorator of one.
_DEFINITION = re.compile(r"^(?=(?:@|def |async def |class ))", re.MULTILINE)
