"""Reads the bodies of upstream's functions from its source, without importing it.

A body is known by a hash over its syntax tree. Left out are docstrings, comments, formatting,
annotations, decorators that only watch, and the fields that differ between Python versions: the
same code has the same hash everywhere. This module is imported when the first body is read, because
`apply()` before Megatron's import needs none of it.

A name may lead to a lambda, to another definition of the module, or to code that was compiled
before its file changed. So `difference` compares the function's code with the code in the file's
.pyc; if there is none, the source is compiled again.

`computed` takes the place of `functools.cached_property`. That has a lock before Python 3.12, and a
class with one does not pickle by value, which is how Ray's users send a package that workers lack.
"""

from __future__ import annotations
import __future__

import ast
import copy
import hashlib
import importlib.util
import marshal
import os
import re
import struct
import sys
import textwrap
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from .base import generated
from .import_hooks import find, namespace

TEXTS = "texts.txt"
_T = TypeVar("_T")


class computed(Generic[_T]):
    """Makes a property whose value is computed once and kept in the instance's `__dict__`.

    Two threads that ask at the same time may both compute it.

    Example:
        class Text:
            @computed
            def length(self) -> int:
                return 4
    """

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> _T:
        value = vars(instance)[self._name] = self._compute(instance)
        return value


_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
#: Nodes with a scope of their own, and a docstring.
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# ctx repeats the position of a node; kind and type_params come and go with the Python version.
_UNSTABLE_FIELDS = frozenset({"ctx", "kind", "type_params", "type_comment"})
_ANNOTATIONS = frozenset({"annotation", "returns"})
#: Decorators that watch a call and change neither its arguments nor its result.
WATCHING = frozenset({"_otel_trace_fn", "nvtx_decorator", "timer", "with_logs"})


def locate(module: str) -> Path | None:
    """Return the source file of `module`, or None.
    No module is imported, not even a parent package.
    """
    path = find(module)
    return None if path is None else Path(path)


class Body:
    """Gives the source of one upstream function as syntax tree, hash and parameters, and tells
    which code it contains.

    Example:
        body = read_body(Path("training.py"), "train")
        body.contains("config.param_sync_func = None")
    """

    def __init__(self, qualname: str, module: str, **fields: Any) -> None:
        """Keep the name and the module's source. `fields` has values of properties that are known
        without parsing, such as `hash`.
        """
        self.qualname = qualname
        self.module = module
        """The source of the module that the function is from."""
        self.__dict__.update(fields)

    @computed
    def tree(self) -> ast.FunctionDef | ast.AsyncFunctionDef:
        """Parse the function's source, and return its syntax tree."""
        tree = parse_function(self.module, self.qualname)
        assert tree is not None  # parse_body() has found it, or its text is a known one
        return tree

    @computed
    def hash(self) -> str:
        """Hash of the function's code: twelve hex digits, the same on every Python version."""
        return hash_of(self.tree)

    @computed
    def line(self) -> int:
        """Return the line at which the function begins, as `co_firstlineno` has it."""
        return line_of(self.tree)

    @computed
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        arguments = self.tree.args
        return tuple(
            a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        )

    @property
    def text(self) -> str:
        """The code as Python would format it: without comments, docstring and line breaks."""
        bare = copy.copy(self.tree)
        bare.body = without_docstring(bare.body) or bare.body
        return ast.unparse(bare)

    @computed
    def nodes(self) -> list[ast.AST]:
        """Return all nodes of the function's syntax tree, parents first."""
        return nodes_of(self.tree)

    @computed
    def own_nodes(self) -> list[ast.AST]:
        """Return the syntax nodes below the function, without those in nested functions, lambdas
        and classes.
        """
        return own_nodes(self.tree)

    @computed
    def bound(self) -> set[str]:
        """Return the names that the function, or a function nested in it, binds: parameters,
        variables, imports.
        """
        bound: set[str] = set()
        elsewhere: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                bound.add(node.id)
            elif isinstance(node, ast.alias):
                bound.add(bound_by(node))
            elif isinstance(node, SCOPES):
                bound.add(node.name)
            elif isinstance(node, ast.Global):
                elsewhere.update(node.names)
        return bound - elsewhere

    def contains(self, fragment: str, *, outside_loops: bool = False) -> bool:
        """Return whether the body has an expression or statement with the code of `fragment`.

        Formatting does not count; with `outside_loops` code in a `for` or `while` does not, either.
        """
        matches = occurrences(self.nodes, fragment)
        if matches and outside_loops:
            loops = (nodes_of(node) for node in self.nodes if type(node) in _LOOPS)
            in_loops = {id(node) for nodes in loops for node in nodes}
            return any(id(node) not in in_loops for node in matches)
        return bool(matches)


def watches(decorator: ast.expr) -> bool:
    """Tell if a decorator only observes calls, such as `nvtx_decorator`.
    Such decorators, listed in `WATCHING`, change neither arguments nor result.
    """
    maker = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(maker, ast.Name) and maker.id in WATCHING


def read_body(path: Path | str, qualname: str) -> Body | None:
    """Return the body of the function `qualname` in a file; None if the file does not define it.

    Raises:
        SyntaxError: this Python cannot parse the file.
        OSError: the file cannot be read.
    """
    return parse_body(read_text(path), qualname)


def read_text(path: Path | str) -> str:
    """Return a file's text, read again only if it has changed.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
    """
    name = os.fspath(path)
    status = os.stat(name)
    return _read_text(name, (status.st_mtime_ns, status.st_size))


# More than the modules around all patches, some 130, which are read in the same order by each rank.
@lru_cache(maxsize=256)
def _read_text(path: str, state: tuple[int, int]) -> str:
    return Path(path).read_text(encoding="utf-8")


# A dozen patches stand around the same few functions, and releases share most of them.
@lru_cache(maxsize=1024)
def parse_body(text: str, qualname: str) -> Body | None:
    """Return the body of the function `qualname` in a module's source; None if it is not there.

    Raises:
        SyntaxError: this Python cannot parse the source.
    """
    piece = cut(text, qualname)
    known_hash = None if piece is None else known_texts().get(piece.digest)
    if piece is not None and known_hash is not None:
        return Body(qualname, text, hash=known_hash, line=piece.line)
    return None if parse_function(text, qualname) is None else Body(qualname, text)


@lru_cache(maxsize=1024)
def parse_function(text: str, qualname: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the syntax tree of a function in a module's source; None if it is not there."""
    first, *inner_names = qualname.split(".")
    node = _parse_method(text, first, inner_names[0]) if len(inner_names) == 1 else None
    if node is None:
        node = _parse_definition(text, first)
        for name in inner_names:
            node = _definition(node.body, name) if node is not None else None
    return node if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None


class Piece(NamedTuple):
    """Holds the source text of one function, cut out of its module, and its first line number."""

    text: str
    line: int
    """The line at which it begins, decorators included."""

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of the text's SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def cut(text: str, qualname: str) -> Piece | None:
    """Cut the lines of a function or method out of a module's source, without parsing it; None if
    the result could be wrong.
    """
    owner, _, name = qualname.rpartition(".")
    if "." in owner:
        return None
    span = _method_span(text, owner, name) if owner else _span(text, _starts(text, name))
    if span is None:
        return None
    return Piece(text[slice(*span)].rstrip(), text.count("\n", 0, span[0]) + 1)


@cache
def known_texts() -> dict[str, str]:
    """Return the contents of `texts.txt`: digest of a function's source text → hash of its body.
    A function whose text is known is not parsed.

    Most functions of a commit have the text of some release.
    """
    both = (line.split() for line in generated(TEXTS))
    return dict(both)


@lru_cache(maxsize=8)  # the methods of one class are asked for one after the other
def _parse_definition(text: str, name: str) -> _Definition | None:
    starts = _starts(text, name)
    if not starts:
        return None
    span = _span(text, starts)
    tree = _parse_lines(text, *span) if span else None
    return _definition((tree or ast.parse(text)).body, name)


def _parse_method(text: str, owner: str, name: str) -> _Definition | None:
    """Parse only the lines of one method, and return its definition; None if these lines cannot be
    found or parsed without the rest.
    """
    span = _method_span(text, owner, name)
    tree = _parse_lines(text, *span, head=f"class {owner}:") if span else None
    return _definition(tree.body[0].body, name) if tree else None  # type: ignore[attr-defined]


def _method_span(text: str, owner: str, name: str) -> tuple[int, int] | None:
    class_span = _span(text, _starts(text, owner))
    return (
        _span(text, _starts(text, name, *class_span), *class_span, indent="    ")
        if class_span
        else None
    )


class Line(NamedTuple):
    """Holds the position of a line that looks like a definition; it may be in a string instead."""

    start: int
    end: int
    """The end of the name in it."""
    indent: str
    is_class: bool


#: A line that looks like a definition, or any other line that is not indented.
_LINE = re.compile(r"^(?:([ \t]*)(?:async\s+def|def|(class))\s+(\w+)|[A-Za-z_@])", re.MULTILINE)


class Layout(NamedTuple):
    """Tells where the definitions and the statements of a module are in its source."""

    definitions: Mapping[str, list[Line]]
    """Name → the lines that may begin a definition of that name."""
    by_indent: Mapping[str, list[int]]
    """Indentation → the offsets of the lines with it that may begin a definition, in order."""
    heads: list[int]
    """The offsets of the unindented lines that begin with a name or a decorator, and of the end."""


@lru_cache(maxsize=256)  # one pass over a module, for all names that are asked for
def layout(text: str) -> Layout:
    """Return the `Layout` of a module's source."""
    lines: dict[str, list[Line]] = {}
    by_indent: dict[str, list[int]] = {}
    heads = []
    for match in _LINE.finditer(text):
        indent, is_class, name = match.groups()
        if name is not None:
            line = Line(match.start(), match.end(), indent, is_class is not None)
            lines.setdefault(name, []).append(line)
            by_indent.setdefault(indent, []).append(line.start)
        if not indent:
            heads.append(match.start())
    return Layout(lines, by_indent, [*heads, len(text)])


@lru_cache(maxsize=256)
def _quotes(text: str) -> tuple[list[int], list[int]]:
    """Return the offsets of triple double quotes, and of triple single quotes, in a source text."""
    double, single = (re.finditer(quotes, text) for quotes in ('"""', "'''"))
    return [match.start() for match in double], [match.start() for match in single]


def _starts(text: str, name: str, begin: int = 0, end: int = sys.maxsize) -> list[Line]:
    return [line for line in layout(text).definitions.get(name, ()) if begin <= line.start < end]


def _span(
    text: str,
    starts: Sequence[Line],
    begin: int = 0,
    end: int = sys.maxsize,
    indent: str = "",
) -> tuple[int, int] | None:
    """Return the offsets at which a definition's lines begin and end in a source text.
    Return None if that is not certain without parsing.

    Parsing only these is four times faster than the 4,700 lines of training.py. Whatever could make
    the cut wrong takes the long way: a second definition, anywhere; one that is conditional, or in
    a string.
    """
    if len(starts) != 1 or starts[0].indent != indent:
        return None
    start = starts[0].start
    # Decorators, with what is between them and the definition.
    same_indent = layout(text).by_indent[indent]
    line_index = bisect_left(same_indent, start)
    above = max(begin, same_indent[line_index - 1] + 1 if line_index else 0)
    decorator = re.compile(rf"^{indent}@", re.MULTILINE).search(text, above, start)
    start = decorator.start() if decorator else start
    if any(
        (bisect_left(quote_starts, start) - bisect_left(quote_starts, begin)) % 2
        for quote_starts in _quotes(text)
    ):
        return None
    next_line = re.compile(rf"^ {{0,{len(indent)}}}[\w@]", re.MULTILINE)
    next_match = next_line.search(text, starts[0].end, end)
    return start, next_match.start() if next_match else min(end, len(text))


def _parse_lines(text: str, start: int, end: int, head: str = "") -> ast.Module | None:
    """Parse the lines of a text between two offsets, below the line `head` if one is given; return
    None if they are no valid code by themselves.
    """
    above = "\n" * (text.count("\n", 0, start) - bool(head))  # for the line numbers
    try:
        return ast.parse(f"{above}{head}\n{text[start:end]}" if head else above + text[start:end])
    except SyntaxError:
        return None


def _definition(statements: Sequence[ast.stmt], name: str) -> _Definition | None:
    definition = None
    for statement in statements:
        if isinstance(statement, _Definition):
            if statement.name == name:
                definition = statement  # the last definition wins, as it does at run time
        elif isinstance(statement, (ast.If, ast.Try, ast.With)):
            blocks = [getattr(statement, part, []) for part in ("body", "orelse", "finalbody")]
            blocks[1:1] = [handler.body for handler in getattr(statement, "handlers", ())]
            definition = (
                _definition([child for block in blocks for child in block], name) or definition
            )
    return definition


def line_of(tree: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the line at which a function begins, decorators included, from its syntax tree."""
    return min([tree.lineno, *(node.lineno for node in tree.decorator_list)])


def hash_of(tree: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return twelve hexadecimal digits for a function's syntax tree: its `Body.hash`. Decorators in
    `WATCHING` do not count.
    """
    bare = copy.copy(tree)
    bare.decorator_list = [decorator for decorator in bare.decorator_list if not watches(decorator)]
    return digest(canonical(bare))


def digest(text: str) -> str:
    """Return the first twelve hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def canonical(node: object) -> str:
    """Return a text of a syntax tree that is equal for two trees exactly when they are the same
    code.
    """
    kind = type(node)
    if kind is str:  # half of all calls
        return repr(node)
    if kind is list:
        return f"[{','.join(map(canonical, node))}]"  # type: ignore[call-overload]
    if not issubclass(kind, ast.AST):
        return repr(node)
    if kind is ast.AnnAssign and node.value is not None:  # type: ignore[attr-defined]
        node = ast.Assign(targets=[node.target], value=node.value)  # type: ignore[attr-defined]
        kind = ast.Assign
    fields = []
    for name in _fields(kind):  # type: ignore[arg-type]
        value = getattr(node, name, None)
        if value is None or value == []:
            continue
        if name == "body" and kind in SCOPES:
            value = without_docstring(value)
        if kind is ast.JoinedStr:
            # Python 3.12 puts an empty text after some nested format specifications.
            value = [v for v in value if not (isinstance(v, ast.Constant) and v.value == "")]
        fields.append(f"{name}={canonical(value)}")
    return f"{kind.__name__}({','.join(fields)})"


def nodes_of(tree: ast.AST, without: tuple[type[ast.AST], ...] = ()) -> list[ast.AST]:
    """Return a syntax tree's nodes, parents first, without those of annotations.

    Args:
        tree: the root, which is the first.
        without: kinds of nodes that are left out, with all that is below them.
    """
    nodes = [tree]
    for node in nodes:  # it grows while it is read
        for name in _fields(type(node)):  # type: ignore[arg-type]
            value = getattr(node, name, None)
            children = value if type(value) is list else (value,)
            nodes += [
                child
                for child in children
                if isinstance(child, ast.AST) and not isinstance(child, without)
            ]
    return nodes
    return nodes


def own_nodes(tree: ast.AST) -> list[ast.AST]:
    """Return the syntax nodes below a function, without those in nested functions, lambdas and
    classes.
    """
    return nodes_of(tree, (*SCOPES, ast.Lambda))[1:]


def bound_by(alias: ast.alias) -> str:
    """Return the name that one name of an import statement binds: `a` for `import a.b`, `c` for
    `import a as c`.
    """
    return (alias.asname or alias.name).partition(".")[0]


def occurrences(nodes: Iterable[ast.AST], fragment: str) -> list[ast.AST]:
    """Return the nodes among `nodes` whose code is equal to that of a source fragment.

    The fragment is one expression or one statement.
    """
    fragment_node, code = _parsed(fragment)
    kinds = {type(fragment_node)} | (
        {ast.AnnAssign} if type(fragment_node) is ast.Assign else set()
    )
    name = _first_name(fragment_node)
    return [
        node
        for node in nodes
        if type(node) in kinds and _first_name(node) == name and canonical(node) == code
    ]


@lru_cache(maxsize=256)
def _parsed(fragment: str) -> tuple[ast.AST, str]:
    (statement,) = ast.parse(fragment).body
    node = statement.value if isinstance(statement, ast.Expr) else statement
    return node, canonical(node)


def _first_name(node: ast.AST) -> str | None:
    """Return one name that a syntax node's code has, or None.
    Nodes with different names have different code, so comparing the names first saves most
    comparisons of code.
    """
    inner: Any = node
    while inner is not None:
        if isinstance(inner, ast.Attribute):
            return inner.attr
        if isinstance(inner, ast.Name):
            return inner.id
        targets = getattr(inner, "targets", None)
        inner = targets[0] if targets else getattr(inner, "target", getattr(inner, "func", None))
    return None


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(
        name for name in kind._fields if name not in _UNSTABLE_FIELDS and name not in _ANNOTATIONS
    )


def without_docstring(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a body without its docstring."""
    if statements and isinstance(statements[0], ast.Expr):
        value = statements[0].value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return statements[1:]
    return statements


_32_BITS = 0xFFFFFFFF
_FEATURES = 0
for _name in __future__.all_feature_names:
    _FEATURES |= getattr(__future__, _name).compiler_flag
_COMPARED = (
    *("co_name", "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount"),
)


def as_compiled(function: object, module: ModuleType, qualname: str) -> bool:
    """Tell if a live function has the code that the .pyc file of its module has at `qualname`.

    The function must have no decorator. False also if no .pyc file fits the source.
    """
    if type(function) is not FunctionType or function.__globals__ is not namespace(module):
        return False
    code, file = function.__code__, str(module.__file__)
    if hasattr(function, "__wrapped__") or os.path.basename(code.co_filename) != (
        os.path.basename(file)
    ):
        return False
    module_code = kept(file)
    return module_code is not None and _is_inside(_ById(code), _ById(module_code), qualname)


class _ById:
    """Makes an object a key of its own. Code objects compare, and hash, all that they contain."""

    __slots__ = ("value",)

    def __init__(self, value: CodeType) -> None:
        self.value = value

    def __hash__(self) -> int:
        return object.__hash__(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.value is other.value


@lru_cache(maxsize=256)  # ranks inherit the answers from the launcher that forks them
def _is_inside(function: _ById, module: _ById, qualname: str) -> bool:
    compiled = _inside(module.value, qualname)
    return (
        compiled is not None
        and compiled.co_firstlineno == function.value.co_firstlineno
        and _same(function.value, compiled)
    )


@lru_cache(maxsize=256)  # apply() asks before it changes anything, and again for each function
def difference(code: CodeType, body: Body, qualname: str) -> str | None:
    """Return None if a live function's code was compiled from `body`. Otherwise say what the code
    is instead, as the end of a sentence for an error message, such as `other_function from
    file.py:12`.
    """
    location = f"{code.co_filename}:{code.co_firstlineno}"
    if code.co_name != body.qualname.rpartition(".")[2]:
        return f"{code.co_name} from {location}"
    if code.co_firstlineno != body.line:
        return f"the one at {location}, and the source that was read begins at line {body.line}"
    if not any(_same(code, compiled) for compiled in _compiled(body, qualname, code)):
        return f"not what {location} says: it was compiled from other source"
    return None


def _compiled(body: Body, qualname: str, like: CodeType) -> Iterator[CodeType]:
    """Yield the code objects that Python may have made of a function's body: first the one in the
    .pyc file, if there is one; then the body compiled alone, below its module's imports; then the
    body compiled as part of the whole module.
    """
    code_like = _inside(kept(like.co_filename), qualname)
    if code_like is not None:
        yield code_like
    definition: ast.stmt = body.tree
    # In its classes, for names like __x and for super().
    for name in reversed(qualname.split(".")[:-1]):
        definition = ast.ClassDef(
            name=name, bases=[], keywords=[], body=[definition], decorator_list=[], type_params=[]
        )
        # By hand: fix_missing_locations visits every node, and takes longer than the compiler.
        definition.lineno = definition.end_lineno = body.line
        definition.col_offset = definition.end_col_offset = 0
    # And after the imports: a call of something that is imported is compiled in its own way.
    module = ast.Module(body=[*imports_of(body.module), definition], type_ignores=[])
    for source in (module, body.module):
        flags = like.co_flags & _FEATURES
        module_code = compile(source, like.co_filename, "exec", flags, dont_inherit=True)
        code_like = _inside(module_code, qualname)
        if code_like is not None:
            yield code_like


def _inside(code: CodeType | None, qualname: str) -> CodeType | None:
    for name in qualname.split("."):
        # The last definition of a name counts, as it does at run time.
        inner = () if code is None else code.co_consts
        codes = [constant for constant in inner if isinstance(constant, CodeType)]
        code = next((constant for constant in reversed(codes) if constant.co_name == name), None)
    return code


def kept(file: str) -> CodeType | None:
    """Return the code object in the .pyc file of the source file `file`.
    Return None if there is no .pyc file, or if it is older than the source.
    """
    try:
        cached = importlib.util.cache_from_source(file)
        source, compiled_stat = os.stat(file), os.stat(cached)
    except (OSError, NotImplementedError):
        return None
    # The file itself notes whole seconds, within which the source may have changed.
    if compiled_stat.st_mtime_ns < source.st_mtime_ns:
        return None
    return _read_kept(cached, int(source.st_mtime), source.st_size)


# As for `_read_text`: with fewer entries than modules, each rank would read all of them again.
@lru_cache(maxsize=256)
def _read_kept(cached: str, seconds: int, size: int) -> CodeType | None:
    # PEP 552: the interpreter's number, no flags, and time and size of the source.
    head = struct.pack("<III", 0, seconds & _32_BITS, size & _32_BITS)
    try:
        with open(cached, "rb") as file:
            data = file.read()
        if data[:16] != importlib.util.MAGIC_NUMBER + head:
            return None
        code = marshal.loads(data[16:])
    except (OSError, EOFError, ValueError, TypeError):
        return None
    return code if isinstance(code, CodeType) else None


@lru_cache(maxsize=256)
def imports_of(text: str) -> tuple[ast.stmt, ...]:
    """Return a module's import statements outside of functions and classes, without parsing all of
    the module.
    """
    import_statements: list[ast.stmt] = []
    outside = True
    for match in re.finditer(r"^(?:([\w@]+)|[ \t]+(?=import\b|from\b))", text, re.MULTILINE):
        if match[1] is not None:
            outside = match[1] not in ("def", "class", "async") and match[1][0] != "@"
        if outside:
            following = text[match.start() : match.start() + 5000]
            statement = re.match(r"[ \t]*(?:import|from)\b[^\n(]*(?:\([^)]*\))?", following)
            try:
                import_statements += (
                    ast.parse(textwrap.dedent(statement[0])).body if statement else []
                )
            except SyntaxError:
                continue  # a text that looks like one; where it matters, the whole file decides
    # Features come with the flags, and nothing may stand before their import.
    return tuple(
        statement_found
        for statement_found in import_statements
        if getattr(statement_found, "module", "") != "__future__"
    )


def _same(first: CodeType, second: CodeType) -> bool:
    if any(getattr(first, name) != getattr(second, name) for name in _COMPARED):
        return False
    if len(first.co_consts) != len(second.co_consts):
        return False
    return all(
        _same(first_constant, second_constant)
        if isinstance(first_constant, CodeType) and isinstance(second_constant, CodeType)
        else type(first_constant) is type(second_constant)
        and (first_constant == second_constant or repr(first_constant) == repr(second_constant))
        for first_constant, second_constant in zip(first.co_consts, second.co_consts, strict=True)
    )
