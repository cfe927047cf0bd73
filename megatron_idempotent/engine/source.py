"""Read upstream's source without importing it: where a module is, what a function's body says.

A body is known by a hash over its syntax tree with docstrings, comments, formatting and the fields
that differ between Python versions left out, so that the same code has the same hash everywhere.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path

_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# ctx repeats the position of a node; kind and type_params come and go with the Python version.
_UNSTABLE_FIELDS = frozenset({"ctx", "kind", "type_params", "type_comment"})


def forget() -> None:
    """Forget where modules were found: `sys.path` may have changed since the last public call."""
    locate.cache_clear()


@cache
def locate(module: str) -> Path | None:
    """The source file of `module`, or None. Imports nothing, not even parent packages."""
    loaded = sys.modules.get(module)
    if loaded is not None and getattr(loaded, "__file__", None):
        return Path(str(loaded.__file__))
    search: Sequence[str] | None = None
    origin: str | None = None
    parts = module.split(".")
    for depth in range(len(parts)):
        name = ".".join(parts[: depth + 1])
        parent = sys.modules.get(name)
        if parent is not None and hasattr(parent, "__path__"):
            # Namespace paths are computed lazily; a list makes them plain.
            search, origin = list(parent.__path__), getattr(parent, "__file__", None)
            continue
        for finder in sys.meta_path:
            # Import-hook finders (wrapt's, ours) would import parents or wake hooks to answer.
            if type(finder).__module__.startswith(("wrapt.", "megatron_idempotent.")):
                continue
            spec = finder.find_spec(name, search)
            if spec is not None:
                break
        else:
            return None
        if depth < len(parts) - 1 and spec.submodule_search_locations is None:
            return None
        origin = spec.origin
        search = list(spec.submodule_search_locations or ())
    return Path(origin) if origin and origin.endswith(".py") else None


class Body:
    """The syntax tree of one function, with the questions that patches ask of it.

    Example:
        body = read_body(Path("training.py"), "train")
        body.contains("config.param_sync_func = None")
    """

    def __init__(self, tree: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.tree = tree

    @cached_property
    def hash(self) -> str:
        """Twelve hexadecimal digits, equal for equal code on every Python version."""
        return hashlib.sha256(canonical(self.tree).encode()).hexdigest()[:12]

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        arguments = self.tree.args
        return tuple(
            a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        )

    def contains(self, fragment: str, *, outside_loops: bool = False) -> bool:
        """Whether an expression or statement that is the same code as `fragment`, formatting
        aside, stands in the body; with `outside_loops`, in no `for` or `while` of it."""
        (wanted,) = ast.parse(fragment).body
        node: ast.AST = wanted.value if isinstance(wanted, ast.Expr) else wanted
        text = canonical(node)
        return any(
            type(other) is type(node) and canonical(other) == text
            for other in _walk(self.tree, outside_loops)
        )


def read_body(path: Path, qualname: str) -> Body | None:
    """The body of `qualname` in the file, or None where the file does not define it.

    Raises:
        SyntaxError: this Python cannot parse the file.
        OSError: the file cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    first, *rest = qualname.split(".")
    node = _parse_definition(text, first)
    for name in rest:
        node = _definition(node.body, name) if node is not None else None
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return Body(node)
    return None


def _walk(node: ast.AST, outside_loops: bool) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not (outside_loops and isinstance(child, (ast.For, ast.While))):
            yield from _walk(child, outside_loops)


def _parse_definition(
    text: str, name: str
) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
    # Parsing only the lines of one definition is four times faster than the 4,700 of training.py.
    # A decorated or conditional definition, or text in column 0 inside of it, takes the long way.
    starts = list(re.finditer(rf"^(?:async def|def|class) {re.escape(name)}\b", text, re.MULTILINE))
    if len(starts) == 1 and not re.search(r"^[@)].*\n\Z", text[: starts[0].start()], re.MULTILINE):
        start = starts[0].start()
        end = re.search(r"^[A-Za-z_@]", text[starts[0].end() :], re.MULTILINE)
        try:
            tree = ast.parse(text[start : starts[0].end() + end.start()] if end else text[start:])
        except SyntaxError:
            pass  # the cut went through a string; the whole file decides below
        else:
            return _definition(tree.body, name)
    return _definition(ast.parse(text).body, name)


def _definition(
    statements: Sequence[ast.stmt], name: str
) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
    found = None
    for statement in statements:
        if isinstance(statement, _Definition):
            if statement.name == name:
                found = statement  # the last definition wins, as it does at run time
        elif isinstance(statement, (ast.If, ast.Try)):
            parts = ("body", "orelse", "finalbody")
            inner = [child for part in parts for child in getattr(statement, part, ())]
            found = _definition(inner, name) or found
    return found


def canonical(node: object) -> str:
    """A text that two syntax trees share exactly when they are the same code."""
    if isinstance(node, ast.AST):
        fields = []
        for name, value in ast.iter_fields(node):
            if name in _UNSTABLE_FIELDS or value is None or value == []:
                continue
            if name == "body" and isinstance(node, _Definition):
                value = _without_docstring(value)
            fields.append(f"{name}={canonical(value)}")
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(canonical, node))}]"
    return repr(node)


def _without_docstring(statements: list[ast.stmt]) -> list[ast.stmt]:
    if statements and isinstance(statements[0], ast.Expr):
        value = statements[0].value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return statements[1:]
    return statements
