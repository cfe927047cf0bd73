"""Tells if a module's source allows what wrappers do with its names, beside reading them.

A wrapper sets an attribute, which a property without a setter, a frozen dataclass or `__slots__`
refuse. It passes keywords, which have to be parameters. And it takes a result apart, which has to
be made as a person has read. In `reads.txt` these are `name!`, `name(keyword)` and `name[hash]`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from .contract import BodyPart
from .source import canonical, digest, parse_body
from .surroundings import bases_of, class_text, has_slots, words


def fits(text: str, owner: str, name: str, use: str) -> bool | None:
    """Tell if a module, or a class in it, allows a use of a name; None if it does not define it.

    Args:
        text: the module's source.
        owner: the class; empty for the module.
        name: the name.
        use: `!`, or `(…)` with keywords, or `[…]` with hashes.
    """
    if use == "!":
        return _may_be_set(text, owner, name)
    if use.startswith("("):
        taken = parameters(text, owner, name)
        return None if taken is None else taken >= set(use[1:-1].split(",")) or "**" in taken
    made = returned(text, owner, name)
    return None if made is None else made in use[1:-1].split("|")


@lru_cache(maxsize=1024)
def _may_be_set(text: str, owner: str, name: str) -> bool | None:
    own = class_text(text, owner)
    if not any(words(own, name)):
        return None
    if is_frozen(text, owner):
        return False
    if has_slots(text, owner) and not re.search(rf"__slots__[^)\]]*[\"']{name}[\"']", own):
        # A dataclass makes them of its fields.
        return "slots=True" in own and bool(re.search(rf"^\s+{name}\s*:", own, re.MULTILINE))
    if "property" not in own:
        return True
    above = r"^[ \t]*@(?:\w+\.)*(?:abstract)?property\s*\n(?:[ \t]*[@#].*\n)*"
    reads = re.search(rf"{above}[ \t]*def {name}\b", own, re.MULTILINE)
    writes = re.search(rf"^[ \t]*@{name}\.setter\b", own, re.MULTILINE)
    made = re.search(rf"^[ \t]+{name}\s*(?::[^=\n]*)?=\s*property\([^,\n]*\)", own, re.MULTILINE)
    return not (made or (reads and not writes))


@lru_cache(maxsize=1024)
def is_frozen(text: str, owner: str) -> bool:
    """Tell if objects of a class take no attribute at all: it is a frozen dataclass, or a tuple."""
    own = class_text(text, owner)
    if "frozen" not in own and "NamedTuple" not in own:
        return False
    decorators = own[: own.find(f"class {owner}")]
    frozen = re.search(r"^[ \t]*@[\w.]*dataclass\([^\n]*\bfrozen\s*=\s*True", decorators, re.M)
    return bool(frozen) or "NamedTuple" in bases_of(text, owner)


@lru_cache(maxsize=1024)
def parameters(text: str, owner: str, name: str) -> frozenset[str] | None:
    """Return the parameters of a function or of a class's constructor, `**` for any other.

    None means that the module does not define it.
    """
    body = parse_body(text, f"{owner}.{name}" if owner else name)
    if body is None and not owner and (own := class_text(text, name)):
        body = parse_body(text, f"{name}.__init__")
        if body is None:
            # Fields of a dataclass; a base class may have others.
            fields = re.findall(r"^(?:[ ]{4}|\t)(\w+)[ ]*:", own, re.MULTILINE)
            return frozenset([*fields, *(["**"] if bases_of(text, name) else [])])
    if body is None:
        return None
    arguments = body.tree.args
    named = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return frozenset([*(a.arg for a in named), *(["**"] if arguments.kwarg else [])])


@lru_cache(maxsize=256)
def returned(text: str, owner: str, name: str) -> str | None:
    """Return a hash of the statements that make a function's result; None if it is not there."""
    body = parse_body(text, f"{owner}.{name}" if owner else name)
    if body is None:
        return None
    results = list(_results(body.tree))
    part = BodyPart(body, map(ast.unparse, results), ())
    return digest("\n".join([part.hash, *map(canonical, results)]))


def _results(tree: Any) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(child, (ast.Return, ast.Yield, ast.YieldFrom)):
            yield child
        yield from _results(child)


def forget() -> None:
    """Let go of what was read off the sources."""
    for cached in (_may_be_set, is_frozen, parameters, returned):
        cached.cache_clear()
