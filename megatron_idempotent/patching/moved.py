"""Finds code that upstream has moved: to another module, a base class, or a new function.

A module that no longer defines a function may still bind its name, by an import or an assignment,
and a class may inherit it. The definition is then judged where it is. Only source is read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .base import Place
from .source import Body, imports_of, layout, parse_body

if TYPE_CHECKING:
    from .releases import Sources

#: The most imports and base classes to follow, one from another.
_DEPTH = 6
#: The most calls to follow: a part of a body does not move further, and train() calls everything.
_CALLS = 2


def definition(
    module: str, qualname: str, sources: Sources, *, inherited: bool = True, depth: int = _DEPTH
) -> tuple[Place, Body] | None:
    """Follow imports, assignments and base classes from `module:qualname` to the function's
    definition. Return the definition's address and body; None if it is not found.

    Args:
        module: the module that binds the function or its class.
        qualname: the function's qualified name in that module.
        sources: reads the modules.
        inherited: True to look for a method in the base classes of its class, too.
        depth: the most imports, assignments and base classes to follow.

    Raises:
        SyntaxError: this Python cannot parse a module on the way.
    """
    text = sources.text(module)
    if text is None or not depth:
        return None
    body = parse_body(text, qualname)
    if body is not None:
        return Place(address=f"{module}:{qualname}"), body
    first, dot, inner_name = qualname.partition(".")
    candidates = []
    for origin_module, name in _origins(text, module, first, sources):
        if dot and sources.text(f"{origin_module}.{name}") is not None:
            candidates.append((f"{origin_module}.{name}", inner_name))
        else:
            candidates.append((origin_module, f"{name}{dot}{inner_name}"))
    if inherited and dot:
        candidates += [(module, f"{base}.{inner_name}") for base in bases_of(text, first)]
    for candidate in candidates:
        resolved = definition(*candidate, sources, inherited=inherited, depth=depth - 1)
        if resolved is not None:
            return resolved
    return None


def called(
    body: Body, module: str, sources: Sources, worth: Callable[[str], bool]
) -> Iterator[tuple[str, Body]]:
    """Yield (module, body) of each function that `body` calls, directly or through one more call,
    and that is defined outside of `body`'s own module.

    A method counts if the call names a module or a class. `self.name()` does not count: such a
    method is mostly in the same module.

    Args:
        body: the body.
        module: the body's module, whose own functions are left out.
        sources: reads the modules.
        worth: returns whether to search a module with this source. Packages are always searched,
            because they may import functions from other modules.
    """
    yielded_addresses: set[str] = set()
    waiting = [(body, module, _CALLS)]
    while waiting:
        caller, home, calls_left = waiting.pop()
        text = sources.text(home)
        if text is None or not calls_left:
            continue
        for name in sorted(_called_names(caller)):
            first, dot, _ = name.partition(".")
            origins = [] if home == module else [home]
            for origin_module, original in _origins(text, home, first, sources):
                origins += (
                    [origin_module, f"{origin_module}.{original}"] if dot else [origin_module]
                )
            if not any(_is_worth(origin, sources, worth) for origin in origins):
                continue
            callee_place, callee = definition(home, name, sources) or (None, None)
            if callee_place is None or callee is None or callee_place.address in yielded_addresses:
                continue
            yielded_addresses.add(callee_place.address)
            yield callee_place.module, callee
            waiting.append((callee, callee_place.module, calls_left - 1))


def _is_worth(module: str, sources: Sources, worth: Callable[[str], bool]) -> bool:
    text = sources.text(module)
    return text is not None and (sources.is_package(module) or worth(text))


def _called_names(body: Body) -> set[str]:
    names = set()
    for node in body.nodes:
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name):
            names.add(called.id)
        elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            names.add(f"{called.value.id}.{called.attr}")
    return names


def _origins(text: str, module: str, name: str, sources: Sources) -> Iterator[tuple[str, str]]:
    """Yield (module, name) pairs from which `name` in `module` may come: by an import statement, a
    `*` import, or an assignment `name = other`.
    """
    package = module if sources.is_package(module) else module.rpartition(".")[0]
    for statement in imports_of(text):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                if alias.asname == name:
                    above, _, last = alias.name.rpartition(".")
                    yield above, last
        elif isinstance(statement, ast.ImportFrom):
            parts = package.split(".")
            above = ".".join(parts[: len(parts) + 1 - statement.level] if statement.level else ())
            origin = ".".join(filter(None, [above, statement.module]))
            for alias in statement.names:
                if alias.name == "*":
                    yield origin, name
                elif (alias.asname or alias.name) == name:
                    yield origin, alias.name
    if f"\n{name}" not in text and not text.startswith(name):  # a pattern takes longer
        return
    for assigned in re.finditer(rf"^{re.escape(name)}\s*=\s*(\w+)\s*(?:#.*)?$", text, re.MULTILINE):
        yield module, assigned[1]


def bases_of(text: str, owner: str) -> list[str]:
    """Return a class's bases as its source names them: `module.Base`, without type parameters."""
    for line in layout(text).definitions.get(owner, ()):
        inner = _BASES.match(text, line.end) if line.is_class else None
        if inner is not None:
            names = re.sub(r"\[[^]]*\]|\w+\s*=\s*\w+", "", inner[1])
            return [base.strip() for base in names.split(",") if base.strip()]
    return []


_BASES = re.compile(r"\s*\(([^)]*)\)")
