"""Edits of a package's source: where to change a function, and the new lines.

A repair of Megatron is kept as edits and not as a diff, so that it holds none of Megatron's lines
and still fits after commits that move them. An edit names a function, an anchor in it, and what to
do there. An anchor is a short fragment of one statement: of a simple statement, or of the header
of a compound one (`if …:`, `for …:`, `def …:`). If several statements have it, it is the one that
is the anchor as a whole. An anchor of several lines is a header and the beginning of its block.
Both sides are compared as `ast.unparse` writes them, so neither quotes nor line breaks count.
"""

from __future__ import annotations

import ast
import copy
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Action = Literal["before", "after", "replace", "substitute", "wrap", "first", "last", "decorate"]


class AnchorError(ValueError):
    """Says that an edit does not fit a source.
    Its function or its anchor is missing, or is there more than once.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """Holds one change of one function, class or module, such as lines to insert.
    The functions below create such changes.

    Example:
        Edit(address="megatron.training.training:train", action="after",
             anchor="gc.disable()", lines="collecting = False")
    """

    address: str
    """`module:qualname` of a function or class, or `module` for the top level of a module."""
    action: Action
    """The kind of change: the function of that name below says what it does."""
    anchor: str = ""
    """A fragment of the statement to edit at; empty for `first`, `last` and `decorate`."""
    lines: str = ""
    """The new lines, without the indentation of their place."""
    until: str = ""
    """For `wrap`: a fragment of the last statement to wrap; empty for the anchor's alone."""
    tail: str = ""
    """For `wrap`: the lines that follow the wrapped statements, e.g. `finally:` and its body."""
    below: str = ""
    """For `wrap`: a fragment of the last statement that becomes the tail's body; empty for none."""

    @property
    def module(self) -> str:
        """The module's dotted name."""
        return self.address.partition(":")[0]

    @property
    def qualname(self) -> str:
        """The function's or class's qualified name; empty for the module."""
        return self.address.partition(":")[2]


def before(address: str, anchor: str, lines: str) -> Edit:
    """Return an `Edit` that inserts lines before a statement, and before a comment directly above
    the statement.
    """
    return Edit(address=address, action="before", anchor=anchor, lines=_clean(lines))


def after(address: str, anchor: str, lines: str) -> Edit:
    """Return an `Edit` that inserts lines after a statement; after its whole block if the statement
    is a compound one.
    """
    return Edit(address=address, action="after", anchor=anchor, lines=_clean(lines))


def replace(address: str, anchor: str, lines: str) -> Edit:
    """Return an `Edit` that replaces a statement, a compound one with its block, by lines.

    Without lines it deletes the statement, and the comment that stands directly above it.
    """
    return Edit(address=address, action="replace", anchor=anchor, lines=_clean(lines))


def substitute(address: str, anchor: str, text: str) -> Edit:
    """Return an `Edit` that replaces the anchor itself by a text, in the one statement or header
    that has it.

    Here the anchor is compared with the source as it is written, character by character.
    """
    return Edit(address=address, action="substitute", anchor=anchor, lines=text)


def wrap(
    address: str, anchor: str, head: str, tail: str = "", *, until: str = "", below: str = ""
) -> Edit:
    """Return an `Edit` that indents statements of one block under a `head` line, and puts the lines
    of `tail` after them.

    Args:
        address: the function.
        anchor: a fragment of the first statement.
        head: for example `try:` or `with torch.no_grad():`.
        tail: for example `finally:` with its indented body.
        until: a fragment of the last statement, in the same block; `...` is the block's last one.
        below: a fragment of a later statement of the block, or `...`: the statements up to it are
            indented under `tail`, for example under `finally:`.
    """
    head, tail = _clean(head), _clean(tail)
    fields = {"anchor": anchor, "lines": head, "tail": tail, "until": until, "below": below}
    return Edit(address=address, action="wrap", **fields)


def first(address: str, lines: str) -> Edit:
    """Return an `Edit` that inserts lines at the beginning of a function or class, after its
    docstring.
    """
    return Edit(address=address, action="first", lines=_clean(lines))


def last(address: str, lines: str) -> Edit:
    """Return an `Edit` that appends lines at the end of a function, a class or a module."""
    return Edit(address=address, action="last", lines=_clean(lines))


def decorate(address: str, lines: str) -> Edit:
    """Return an `Edit` that puts decorators directly above the `def` or `class` of a function or
    class.
    """
    return Edit(address=address, action="decorate", lines=_clean(lines))


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """Holds the repair of one hazard in upstream's own code, and what its proof needs.

    Example:
        REPAIR = Repair(
            edits=(after("megatron.training.training:train", "gc.disable()", "..."),),
            unit_tests=("test_training.py",),
        )
    """

    edits: tuple[Edit, ...]
    """The edits, in the order in which they are made."""
    unit_tests: tuple[str, ...] = ()
    """Upstream's own unit tests of the edited files, by their paths below `tests/unit_tests`."""
    ranks: int = 1
    """How many ranks run `test_repair.py`."""
    also: tuple[str, ...] = ()
    """Other hazards that the same edits repair."""
    after: tuple[str, ...] = ()
    """Hazards whose repairs have to be made before this one, which builds on their lines."""
    leaves: str = ""
    """The part of the hazard that stays, for which `apply()` keeps the patch; "" if none does."""
    rereads: tuple[str, ...] = ()
    """Patches of other hazards that `apply()` refuses as `drifted` beside this repair, because it
    changes lines that they rely on: somebody has to read them again once it is merged."""

    def files(self, root: Path, texts: Mapping[Path, str] | None = None) -> dict[Path, str]:
        """Return path → edited text, for each file that the repair changes.

        Args:
            root: the folder that has the packages.
            texts: path → text, for files that earlier repairs have changed; others are read.

        Raises:
            AnchorError: a module is not there, or an edit does not fit.
        """
        changed: dict[Path, str] = {}
        for edit in self.edits:
            path = file_of(edit.module, root)
            text = changed.get(path, (texts or {}).get(path))
            changed[path] = edited(path.read_text("utf-8") if text is None else text, edit)
        return changed


def file_of(module: str, root: Path) -> Path:
    """Return the file of a module below the folder that has the packages.

    Raises:
        AnchorError: there is none.
    """
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    raise AnchorError(f"{root} has no module {module}")


def edited(text: str, edit: Edit) -> str:
    """Return a module's text after one edit.

    Raises:
        AnchorError: the module does not define the function, or the anchor is not there exactly
            once.
    """
    tree = ast.parse(text)
    owner = _owner(tree, edit)
    lines = text.splitlines(keepends=True)
    return "".join(_ACTIONS[edit.action](lines, owner, edit))


def _clean(lines: str) -> str:
    """Remove the common indentation and the first line break; blank lines at the end stay."""
    return textwrap.dedent(lines).removeprefix("\n")


def _owner(tree: ast.Module, edit: Edit) -> ast.AST:
    """Return the syntax node of the module, class or function that an edit's address names."""
    owner: ast.AST = tree
    for name in filter(None, edit.qualname.split(".")):
        inside = list(_definitions(owner, name))
        if len(inside) != 1:
            count = "no" if not inside else str(len(inside))
            raise AnchorError(f"{edit.module} has {count} definitions of {edit.qualname}")
        (owner,) = inside
    return owner


def _definitions(owner: ast.AST, name: str) -> Iterator[ast.AST]:
    """Yield the classes and functions with this name in an owner, but not those nested in other
    classes or functions.
    """
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for child in ast.iter_child_nodes(owner):
        if isinstance(child, kinds):
            if child.name == name:
                yield child
        else:
            yield from _definitions(child, name)


def _statements(owner: ast.AST, *, deep: bool) -> Iterator[ast.stmt]:
    """Yield the statements of a module, class or function.
    With `deep`, also yield those of functions inside of it.
    """
    for child in ast.iter_child_nodes(owner):
        if isinstance(child, ast.stmt):
            yield child
        definition = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if deep or not definition:
            yield from _statements(child, deep=deep)


def _written(statement: ast.stmt) -> str:
    """Return a simple statement, or a compound one's header, as `ast.unparse` writes it."""
    header = copy.copy(statement)
    if isinstance(header, ast.Try):
        return "try:"
    if isinstance(header, ast.Match):
        return f"match {ast.unparse(header.subject)}:"
    if hasattr(header, "body"):
        header.body = [ast.Pass()]
    if hasattr(header, "orelse"):
        header.orelse = []
    return ast.unparse(ast.fix_missing_locations(header)).removesuffix("    pass").rstrip()


def _normal(anchor: str) -> str:
    """Return an anchor, a fragment of code to find, as `ast.unparse` writes it.
    A block's header may stand without its body. If the fragment cannot be parsed, only its
    whitespace is collapsed.
    """
    for text, cut in ((anchor, ""), (f"{anchor}\n    pass", "    pass")):
        try:
            return ast.unparse(ast.parse(text)).removesuffix(cut).rstrip()
        except SyntaxError:
            continue
    return " ".join(anchor.split())


def _one(found: list[ast.stmt], anchor: str, edit: Edit) -> ast.stmt:
    if len(found) == 1:
        return found[0]
    place = edit.address
    if not found:
        raise AnchorError(f"`{anchor}` is not in {place}")
    numbers = ", ".join(str(statement.lineno) for statement in found)
    raise AnchorError(f"`{anchor}` is in {place} {len(found)} times: lines {numbers}")


def _anchored(owner: ast.AST, anchor: str, edit: Edit) -> ast.stmt:
    """Return the one statement of an owner (module, class or function) that contains an anchor.
    If several contain it, return the one that is the anchor; else raise `AnchorError`.
    """
    fragment = _normal(anchor)
    deep = not isinstance(owner, ast.Module)
    found = [s for s in _statements(owner, deep=deep) if fragment in _written(s)]
    if "\n" in fragment:
        found = [s for s in _statements(owner, deep=deep) if ast.unparse(s).startswith(fragment)]
    whole = [s for s in found if fragment == _written(s)]
    return _one(whole if len(whole) == 1 else found, anchor, edit)


def _start(statement: ast.AST) -> int:
    """Return the index, from 0, of a statement's first line, which may be its decorator's."""
    decorators = getattr(statement, "decorator_list", [])
    numbers = [statement.lineno, *(d.lineno for d in decorators)]  # type: ignore[attr-defined]
    return int(min(numbers)) - 1


def _with_comment(lines: list[str], statement: ast.stmt) -> int:
    """Return the index of the first line of a statement and the comment directly above it."""
    index = _start(statement)
    while index and lines[index - 1].startswith(" " * statement.col_offset + "#"):
        index -= 1
    return index


def _indented(lines: str, indent: int) -> list[str]:
    return [f"{' ' * indent}{line}".rstrip() + "\n" for line in lines.splitlines()]


def _before(lines: list[str], owner: ast.AST, edit: Edit) -> list[str]:
    statement = _anchored(owner, edit.anchor, edit)
    index = _start(statement)
    if lines[index].lstrip().startswith("elif"):
        raise AnchorError(f"`{edit.anchor}` is an elif of {edit.address}: nothing can precede it")
    index = _with_comment(lines, statement)
    return lines[:index] + _indented(edit.lines, statement.col_offset) + lines[index:]


def _after(lines: list[str], owner: ast.AST, edit: Edit) -> list[str]:
    statement = _anchored(owner, edit.anchor, edit)
    end = statement.end_lineno or 0
    return lines[:end] + _indented(edit.lines, statement.col_offset) + lines[end:]


def _replace(lines: list[str], owner: ast.AST, edit: Edit) -> list[str]:
    statement = _anchored(owner, edit.anchor, edit)
    start, end = _start(statement), statement.end_lineno or 0
    if not edit.lines:
        start = _with_comment(lines, statement)
        if start and not lines[start - 1].strip() and not "".join(lines[end : end + 1]).strip():
            end += 1  # of the two blank lines around it one is enough
    return lines[:start] + _indented(edit.lines, statement.col_offset) + lines[end:]


def _substitute(lines: list[str], owner: ast.AST, edit: Edit) -> list[str]:
    """Replace the anchor in the one simple statement or block header that contains the anchor.
    Return the new lines.
    """
    spans = []
    for statement in (
        *((owner,) if isinstance(owner, ast.stmt) else ()),
        *_statements(owner, deep=not isinstance(owner, ast.Module)),
    ):
        block = getattr(statement, "body", None)
        end = _start(block[0]) if block else statement.end_lineno or 0
        end = max(end, statement.lineno)
        text = "".join(lines[statement.lineno - 1 : end])
        if edit.anchor in text:
            if text.count(edit.anchor) > 1:
                raise AnchorError(
                    f"`{edit.anchor}` is in one statement of {edit.address} "
                    f"{text.count(edit.anchor)} times: line {statement.lineno}"
                )
            spans.append((statement, end, text))
    statement = _one([span[0] for span in spans], edit.anchor, edit)
    _, end, text = spans[0]
    changed = text.replace(edit.anchor, edit.lines)
    return lines[: statement.lineno - 1] + changed.splitlines(keepends=True) + lines[end:]


def _wrap(lines: list[str], owner: ast.AST, edit: Edit) -> list[str]:
    statement = _anchored(owner, edit.anchor, edit)
    block = next(
        block
        for node in (owner, *ast.walk(owner))
        for name in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(node, name, None), list) and statement in block
    )
    last = _last_of(block, edit.until, statement, owner, edit)
    below = _last_of(block, edit.below, last, owner, edit)
    start, middle, end = _start(statement), last.end_lineno or 0, below.end_lineno or 0
    in_strings = {
        number
        for node in ast.walk(ast.Module(block, []))
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno
        for number in range(node.lineno, node.end_lineno)
    }
    wrapped = [
        line if index in in_strings or not line.strip() else f"    {line}"
        for index, line in enumerate(lines[start:end], start)
    ]
    under_head, under_tail = wrapped[: middle - start], wrapped[middle - start :]
    while under_tail and not under_tail[0].strip():
        del under_tail[0]
    indent = statement.col_offset
    head, tail = _indented(edit.lines, indent), _indented(edit.tail, indent)
    return lines[:start] + head + under_head + tail + under_tail + lines[end:]


def _last_of(
    block: list[ast.stmt], fragment: str, earlier: ast.stmt, owner: ast.AST, edit: Edit
) -> ast.stmt:
    """Return a range's last statement, which `fragment` names; `...` names the block's last one.
    Without a fragment, return `earlier`, the first statement of the range.
    """
    if not fragment:
        return earlier
    statement = block[-1] if fragment == "..." else _anchored(owner, fragment, edit)
    if statement not in block or block.index(statement) < block.index(earlier):
        raise AnchorError(f"`{fragment}` does not follow `{edit.anchor}` in {edit.address}")
    return statement


def _first(lines: list[str], owner: ast.AST, edit: Edit) -> list[str]:
    body = owner.body  # type: ignore[attr-defined]
    if ast.get_docstring(owner) is not None:  # type: ignore[arg-type]
        index, indent = body[0].end_lineno, body[0].col_offset
    else:
        index, indent = _with_comment(lines, body[0]), body[0].col_offset
    return lines[:index] + _indented(edit.lines, indent) + lines[index:]


def _last(lines: list[str], owner: ast.AST, edit: Edit) -> list[str]:
    statement = owner.body[-1]  # type: ignore[attr-defined]
    end = statement.end_lineno
    return lines[:end] + _indented(edit.lines, statement.col_offset) + lines[end:]


def _decorate(lines: list[str], owner: ast.AST, edit: Edit) -> list[str]:
    index = owner.lineno - 1  # type: ignore[attr-defined]
    return lines[:index] + _indented(edit.lines, owner.col_offset) + lines[index:]  # type: ignore[attr-defined]


_ACTIONS: Mapping[Action, Callable[[list[str], ast.AST, Edit], list[str]]] = {
    "before": _before,
    "after": _after,
    "replace": _replace,
    "substitute": _substitute,
    "wrap": _wrap,
    "first": _first,
    "last": _last,
    "decorate": _decorate,
}
