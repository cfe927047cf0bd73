"""Shows new statements of a body by comparing hashes, because a reviewed body's text is not kept.

`accepted.txt`, which `megatron-idempotent drift --accept` writes, has a line for every reviewed
body: its hash, then four characters for each of its statements.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from functools import cache
from typing import NamedTuple

from megatron_idempotent.patching.base import generated
from megatron_idempotent.patching.source import Body, canonical, watches, without_docstring

ACCEPTED = "accepted.txt"
#: Characters of a statement's hash: 24 bits are enough for the statements of one body.
_DIGITS = 4
#: The number of unchanged lines that are shown around a change.
_CONTEXT = 2
#: The lines that begin blocks of a compound statement other than the first.
_OPENS = {"orelse": "else:", "finalbody": "finally:"}


class Statement(NamedTuple):
    """Holds the hash and the text of one statement, or of a compound statement's header."""

    hash: str
    """The first four characters of a hash of the statement and its depth."""
    text: str
    """The statement as Python would format it, indented."""


def statements(body: Body) -> list[Statement]:
    """Return a function's decorators, signature and statements, each as a `Statement`.
    Decorators that only observe calls are left out.
    """
    tree = body.tree
    decorators = [decorator for decorator in tree.decorator_list if not watches(decorator)]
    kind = type(tree).__name__
    return [
        *(
            _statement(canonical(decorator), f"@{ast.unparse(decorator)}", 0)
            for decorator in decorators
        ),
        _statement(f"{kind} {canonical(tree.args)}", _header(tree), 0),
        *_block(tree.body, 1),
    ]


def accepted_lines(bodies: Iterable[Body]) -> list[str]:
    """Return the lines of `accepted.txt` for these bodies, sorted by hash.
    A line has a body's hash and the hashes of its statements.
    """
    hashes_of = {
        body.hash: "".join(statement.hash for statement in statements(body)) for body in bodies
    }
    return [f"{name} {hashes}" for name, hashes in sorted(hashes_of.items())]


@cache
def accepted() -> Mapping[str, tuple[str, ...]]:
    """Return the contents of `accepted.txt`: hash of a body → the hashes of its statements."""
    return {
        name: tuple(hashes[i : i + _DIGITS] for i in range(0, len(hashes), _DIGITS))
        for name, _, hashes in (line.partition(" ") for line in generated(ACCEPTED))
    }


class Change(NamedTuple):
    """Holds the difference between a function's body and the most similar reviewed body."""

    label: str
    """The releases of the most similar body."""
    lines: tuple[str, ...]
    """The lines of a diff: `+` and a new statement, `-` and the number of removed statements, and
    unchanged statements; `@@` between parts."""
    new: int
    """The number of new statements."""
    gone: int
    """The number of removed statements."""


def change(body: Body, reviewed: Mapping[str, str]) -> Change | None:
    """Compare a function's body with the most similar reviewed body of the function.
    The two are compared by the hashes of their statements.

    Args:
        body: the unreviewed body.
        reviewed: hash of a reviewed body → its releases, for one target.

    Returns:
        The difference; None if none of the reviewed bodies is in `accepted.txt`.
    """
    body_statements = statements(body)
    hashes = [statement.hash for statement in body_statements]
    nearest: tuple[float, str, SequenceMatcher[str]] | None = None
    for name, label in reviewed.items():
        accepted_hashes = accepted().get(name)
        if accepted_hashes is None:
            continue
        matcher = SequenceMatcher(None, accepted_hashes, hashes, autojunk=False)
        # Of equally similar bodies the last, which is the newest.
        if nearest is None or matcher.ratio() >= nearest[0]:
            nearest = matcher.ratio(), label, matcher
    if nearest is None:
        return None
    _, label, matcher = nearest
    edits = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    return Change(
        label,
        tuple(_lines(matcher, body_statements)),
        new=sum(stop - start for _, _, _, start, stop in edits),
        gone=sum(stop - start for _, start, stop, _, _ in edits),
    )


def _lines(matcher: SequenceMatcher[str], body_statements: list[Statement]) -> Iterator[str]:
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        yield "@@"
        for tag, start, stop, first, last in group:
            if tag == "equal":
                yield from (f" {statement.text}" for statement in body_statements[first:last])
                continue
            if stop > start:
                yield f"-({stop - start} statement{'s' if stop - start > 1 else ''})"
            yield from (f"+{statement.text}" for statement in body_statements[first:last])


def _block(block: list[ast.stmt], depth: int) -> Iterator[Statement]:
    for node in without_docstring(block):
        yield _statement(canonical(_bare(node)), _header(node), depth)
        yield from _block(getattr(node, "body", []), depth + 1)
        for handler in getattr(node, "handlers", ()):
            kind = f"except {ast.unparse(handler.type)}" if handler.type else "except"
            name = f" as {handler.name}" if handler.name else ""
            yield _statement(f"{kind}{name}", f"{kind}{name}:", depth)
            yield from _block(handler.body, depth + 1)
        for name, opens in _OPENS.items():
            if getattr(node, name, None):
                yield _statement(opens, opens, depth)
                yield from _block(getattr(node, name), depth + 1)


def _statement(code: str, text: str, depth: int) -> Statement:
    digest = hashlib.sha256(f"{depth} {code}".encode()).digest()
    return Statement(urlsafe_b64encode(digest).decode()[:_DIGITS], "    " * depth + text)


def _bare(node: ast.stmt) -> ast.stmt:
    """Return a copy of a compound statement without its blocks."""
    bare = copy.copy(node)
    for name in ("body", "orelse", "finalbody", "handlers"):
        if hasattr(bare, name):
            setattr(bare, name, [])
    return bare


def _header(node: ast.stmt) -> str:
    """Return a statement as one line of source; for a compound statement, only its header."""
    lines = [line.strip() for line in ast.unparse(node).splitlines()]
    if hasattr(node, "body"):
        return next(line for line in lines if not line.startswith("@"))
    return " ".join(lines)
