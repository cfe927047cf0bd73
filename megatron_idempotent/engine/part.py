"""The part of a body that touches what a wrapper relies on, and where in the body it stands.

`train()` changes with every release, and a wrapper around it is right or wrong for the sake of a
few statements. The wrapper's fragments name what it shares with the body: attributes, texts, names.
The part is every statement that touches one of these, in order, each under the conditions and loops
that it stands in. On the way from 0.12 to 0.20 `train()` had 116 bodies; the part around
`no_sync_func` was one of three.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from .computed import computed
from .source import Body, canonical, digest

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
#: Of compound statements: what they decide by, and the blocks that they decide over.
_HEADS = ("test", "target", "iter", "items", "subject")
_BLOCKS = ("body", "orelse", "finalbody")

_Step = tuple[str, tuple[ast.AST, ...]]
"""A kind and the code that belongs to it: ("if", (test,)), ("orelse", ()), ("", (statement,))."""


class Part:
    """Statements of a body that touch the same things as `fragments` do.

    Args:
        parameters: names of the function's; their declarations belong to it.
    """

    def __init__(self, body: Body, fragments: Iterable[str], parameters: Iterable[str]) -> None:
        self._tree = body.tree
        self._fragments = tuple(fragments)
        self._parameters = sorted(set(parameters))

    @computed
    def hash(self) -> str:
        """Twelve hexadecimal digits, equal for equal parts on every Python version."""
        lines = (
            ">".join(f"{kind}({','.join(map(canonical, nodes))})" for kind, nodes in line)
            for line in self._lines
        )
        return digest("\n".join(lines))

    @property
    def text(self) -> str:
        """A line per statement, for people."""
        return "\n".join(" > ".join(map(_readable, line)) for line in self._lines)

    @computed
    def _lines(self) -> list[tuple[_Step, ...]]:
        things = _Things(self._fragments, _locals(self._tree))
        declared = _declarations(self._tree.args)
        parameters = [
            ((f"parameter {name}", declared[name]),)
            for name in self._parameters
            if name in declared
        ]
        return [*parameters, *_touching(things, self._tree.body, (), own=True)]


def _touching(
    things: _Things, statements: Sequence[ast.stmt], above: tuple[_Step, ...], *, own: bool
) -> Iterator[tuple[_Step, ...]]:
    """The lines of these statements. `own`: they are the function's, not of one inside of it."""
    for statement in statements:
        if isinstance(statement, _SCOPES):
            step = (f"def {statement.name}", ())
            yield from _touching(things, statement.body, (*above, step), own=False)
            continue
        arms = list(_arms(statement))
        decides = _head(statement) if arms else _plain(statement)
        if things.touched_by(decides[1], own=own):
            yield (*above, decides)
        for arm, block in arms:
            yield from _touching(things, block, (*above, decides, arm), own=own)


def _arms(statement: ast.stmt) -> Iterator[tuple[_Step, Sequence[ast.stmt]]]:
    for name in _BLOCKS:
        if getattr(statement, name, None):
            yield (name, ()), getattr(statement, name)
    for handler in getattr(statement, "handlers", ()):
        yield ("except", () if handler.type is None else (handler.type,)), handler.body
    for case in getattr(statement, "cases", ()):
        guard = () if case.guard is None else (case.guard,)
        yield ("case", (case.pattern, *guard)), case.body


def _head(statement: ast.stmt) -> _Step:
    nodes: list[ast.AST] = []
    for name in _HEADS:
        value = getattr(statement, name, ())
        nodes += value if isinstance(value, (list, tuple)) else (value,)
    return type(statement).__name__.lower(), tuple(nodes)


def _plain(statement: ast.stmt) -> _Step:
    # What an assertion says where it fails does nothing where all is well.
    if isinstance(statement, ast.Assert):
        return "assert", (statement.test,)
    return "", (statement,)


def _declarations(arguments: ast.arguments) -> dict[str, tuple[ast.AST, ...]]:
    """The parameters with their defaults, without their types."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    both = [
        *zip(positional, defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {a.arg: () if default is None else (default,) for a, default in both}


class _Things:
    """The attributes, texts and names that fragments speak of.

    Attributes by their name, whatever they are attributes of; texts; what is returned. Names that
    the function binds by what binds them, other names by every use.
    """

    def __init__(self, fragments: Iterable[str], bound_here: set[str]) -> None:
        self._attributes: set[str] = set()
        self._texts: set[str] = set()
        self._names: set[str] = set()
        self._returns = False
        self._bound_here = bound_here
        for fragment in fragments:
            self._add(list(ast.walk(ast.parse(fragment))))

    def _add(self, nodes: list[ast.AST]) -> None:
        inner = {
            name.id
            for node in nodes
            if isinstance(node, _COMPREHENSIONS)
            for generator in node.generators
            for name in ast.walk(generator.target)
            if isinstance(name, ast.Name)
        }
        # `timers('a').start()` speaks of the timer called a, not of all that starts.
        methods = {
            id(node.func)
            for node in nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Call)
        }
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._texts.add(node.value)
            elif isinstance(node, ast.Attribute) and id(node) not in methods:
                self._attributes.add(node.attr)
            elif isinstance(node, ast.Name) and node.id not in inner:
                self._names.add(node.id)
            elif isinstance(node, ast.Return):
                self._returns = True

    def touched_by(self, code: Sequence[ast.AST], *, own: bool) -> bool:
        if self._returns and own and any(isinstance(node, ast.Return) for node in code):
            return True
        return any(self._is_one(node) for root in code for node in ast.walk(root))

    def _is_one(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr in self._attributes
        if isinstance(node, ast.Constant):
            return isinstance(node.value, str) and node.value in self._texts
        if isinstance(node, ast.Call):  # setattr(a, 'b', c)
            return any(
                isinstance(argument, ast.Constant) and argument.value in self._attributes
                for argument in node.args[1:2]
            )
        if isinstance(node, ast.Name):
            binds = not isinstance(node.ctx, ast.Load)
            return node.id in self._names and (binds or node.id not in self._bound_here)
        if isinstance(node, ast.alias):
            return _bound_by(node) in self._names
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            return not self._names.isdisjoint(node.names)
        return False


def _locals(tree: ast.AST) -> set[str]:
    """The names that the function, or one in it, binds."""
    bound: set[str] = set()
    elsewhere: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add(_bound_by(node))
        elif isinstance(node, _SCOPES):
            bound.add(node.name)
        elif isinstance(node, ast.Global):
            elsewhere.update(node.names)
    return bound - elsewhere


def _bound_by(alias: ast.alias) -> str:
    return (alias.asname or alias.name).partition(".")[0]


def _readable(step: _Step) -> str:
    kind, nodes = step
    return f"{kind} {', '.join(map(ast.unparse, nodes))}".strip()
