"""Collects the names of upstream that the code of wrappers reads, calls or sets.

The functions of this package that a wrapper uses are searched, too. A name is collected from an
attribute, `getattr(object, "name")`, `from megatron… import name`, or a table of names that a loop
iterates over. Its use is collected as well: whether an attribute is set, the keywords of a call,
whether a result is unpacked or indexed.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401  # before what it finds

from megatron_idempotent.patching.base import Record

_PACKAGE = "megatron_idempotent"
#: The packages whose code is searched. Others of this package do not use upstream for wrappers.
_FOLLOWED = ("megatron_idempotent.patches.", "megatron_idempotent.megatron.")
#: Names of records in case files, whose ids wrappers read.
_DECLARED = frozenset({"PATCH", "HELPER", "LIMIT"})
#: Calls whose second argument is the name of an attribute.
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr"})
#: Methods of `vars(object)` whose first argument is the name of an attribute.
_OF_VARS = frozenset({"get", "pop", "setdefault"})
#: Names that show that a wrapper keeps state about one of upstream's objects.
_KEEPING = frozenset({"PerProcessWeakKeys", "WeakKeyDictionary", "ref", "vars"})


class Read(Record):
    """Describes a name of upstream that a wrapper reads, calls or sets.

    Example:
        Read(module="megatron.core.parallel_state", name="model_parallel_is_initialized")
    """

    name: str
    module: str = ""
    """The module that has to bind the name; empty for an attribute of an object."""
    of_self: bool = False
    """True for an attribute of the object whose method is wrapped."""
    guarded: bool = False
    """True if the code works without the name: in a `try`, with a default of `getattr`."""
    use: str = ""
    """The use, if the name is not only read: `!` if it is set, `(keyword)` if it is called with
    that keyword, `[]` if the result is unpacked, indexed or iterated over."""


class _Module:
    """Holds the names that a module of this package binds at its top level."""

    def __init__(self, module: str) -> None:
        self.module = module
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        self.definitions: dict[str, ast.AST] = {}
        self.imported: dict[str, tuple[str, str]] = {}
        self.protocols: set[str] = set()
        """Methods of our own protocols, which are not upstream's."""
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and any(
                isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases
            ):
                self.protocols |= {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.definitions[node.name] = node
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        self.definitions[target.id] = node.value
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self.imported.update(imports(node, module))


def imports(
    node: ast.Import | ast.ImportFrom, module: str
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield (bound name, (source module, source name)) for each name that an import statement
    binds. The source name is empty after `import m`, which binds a module.

    `module` is the name of the module with the statement, from which relative imports start.
    """
    for alias in node.names:
        bound = alias.asname or alias.name.partition(".")[0]
        if isinstance(node, ast.Import):
            yield bound, (alias.name if alias.asname else bound, "")
            continue
        package = module.split(".")[: -node.level] if node.level else []
        yield bound, (".".join([*package, *(node.module or "").split(".")]).strip("."), alias.name)


@cache
def _source(module: str) -> _Module:
    return _Module(module)


@cache
def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def reads_of(wrapper: Callable[..., Any], *, of_class: bool) -> tuple[frozenset[Read], bool]:
    """Return the names of upstream that a wrapper reads, calls or sets.
    Names in functions of this package that the wrapper uses, also indirectly, are included.

    Args:
        wrapper: a plain function of a module.
        of_class: True if it wraps a method, so that its `self` is upstream's object.

    Returns:
        The reads, and True if the code sets attributes of our own on upstream's objects.
    """
    reads: set[Read] = set()
    waiting = [(wrapper.__module__, wrapper.__name__, of_class, "")]
    followed = set()
    our_names: set[str] = set()
    keeps = False
    while waiting:
        reference = waiting.pop()
        if reference in followed:
            continue
        followed.add(reference)
        module, name, has_self, table_use = reference
        if not f"{module}.".startswith(_FOLLOWED):
            continue
        source = _source(module)
        if name in source.definitions:
            definition = _Definition(source, source.definitions[name], has_self, table_use)
            reads |= definition.reads
            keeps |= definition.keeps
            our_names |= definition.our_names | source.protocols
            waiting += [(m, n, False, definition.table_use_of(m, n)) for m, n in definition.uses]
        elif name in source.imported:
            origin, inner = source.imported[name]
            if origin.startswith(_PACKAGE) and inner:
                waiting.append((origin, inner, False, table_use))
    return frozenset(read for read in reads if read.module or read.name not in our_names), keeps


class _Definition:
    """Collects the names of upstream that one function, class or constant reads, calls or sets.

    Args:
        source: the module of the definition.
        root: the syntax tree of the definition.
        of_class: True if `self` is upstream's object.
        table_use: for a table, `get` or `set`, the use of the attributes that it names; "" if its
            texts are not names.
    """

    def __init__(self, source: _Module, root: ast.AST, of_class: bool, table_use: str = "") -> None:
        self._source, self._of_class = source, of_class
        self.reads: set[Read] = set()
        self.uses: set[tuple[str, str]] = set()
        self.keeps = False
        nodes = [*ast.walk(root)]
        self.our_names: set[str] = set()
        if isinstance(root, ast.ClassDef):
            self.our_names = {
                n.attr
                for n in nodes
                if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                if isinstance(n.value, ast.Name) and n.value.id == "self"
            }
            self.our_names |= {n.name for n in root.body if isinstance(n, ast.FunctionDef)}
        self._imported = dict(source.imported)
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._imported.update(imports(node, source.module))
        self._local = {n.arg for n in nodes if isinstance(n, ast.arg)}
        self._local |= {
            n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        # If a call reads or sets an attribute by a variable, the texts in this code, or in a
        # table of the module, are names of attributes.
        by_variable = [node for node in nodes if self._named_attribute(node) == ""]
        sets = any(ast.unparse(node.func) == "setattr" for node in by_variable)  # type: ignore[attr-defined]
        self._table_use = table_use or ("set" if sets else "get" if by_variable else "")
        parents = {id(child): node for node in nodes for child in ast.iter_child_nodes(node)}
        # `a.b.c` is one chain; a function's annotations and defaults are skipped.
        chains = (n.value for n in nodes if isinstance(n, ast.Attribute))
        skipped = {id(inner) for inner in chains if isinstance(inner, ast.Attribute)}
        types = [getattr(n, kind, None) for n in nodes for kind in ("annotation", "returns")]
        types += [n.args for n in nodes if isinstance(n, ast.FunctionDef)]
        skipped |= _under(filter(None, types))
        tried = _under(
            statement
            for n in nodes
            if isinstance(n, ast.Try) and n.handlers
            for statement in n.body
        )
        for node in nodes:
            if id(node) in skipped:
                continue
            guarded = id(node) in tried
            if isinstance(node, ast.Call):
                self._call(node, guarded, _takes_apart(node, parents, nodes))
            if isinstance(node, ast.Attribute):
                self._attribute(node, guarded)
            elif isinstance(node, ast.ImportFrom):
                for _, (module, name) in imports(node, source.module):
                    if module.startswith("megatron."):
                        self.reads.add(Read(name=name, module=module, guarded=guarded))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self._name(node.id)
            elif isinstance(node, ast.Call) and (attribute := self._named_attribute(node)):
                # A `getattr` with a default, `hasattr` and `vars` work without the attribute.
                called = node.func.id if isinstance(node.func, ast.Name) else ""
                strict = called in ("setattr", "delattr") or (
                    called == "getattr" and len(node.args) == 2
                )
                self._add(attribute, guarded or not strict, node.args[0])
                if called in ("setattr", "delattr"):
                    self._add(attribute, guarded, node.args[0], "!")
            elif isinstance(node, ast.Tuple) and (pair := self._pair(node)):
                self.reads.add(Read(name=pair[1], module=pair[0], guarded=True))
                skipped |= _under(node.elts[:2])
            elif self._table_use and (text := self._constant(node)).isidentifier():
                self._add(text, True, None)
                if self._table_use == "set":
                    self._add(text, True, None, "!")

    def table_use_of(self, module: str, name: str) -> str:
        """Return whether this code gets or sets attributes that a table of its module names.
        The table is a tuple, list, set or dict called `name`. Return `get` or `set`; "" if there is
        no such table, or the code reads and sets no attribute by a variable.
        """
        table = self._source.definitions.get(name) if module == self._source.module else None
        is_table = isinstance(table, (ast.Tuple, ast.List, ast.Set, ast.Dict))
        return self._table_use if is_table else ""

    def _call(self, node: ast.Call, guarded: bool, is_taken_apart: bool) -> None:
        """Record a call of upstream: its keywords, and if its result is unpacked or indexed."""
        keywords = sorted(keyword.arg for keyword in node.keywords if keyword.arg is not None)
        uses = [*([f"({','.join(keywords)})"] if keywords else ()), *["[]"][:is_taken_apart]]
        for use in uses:
            if isinstance(node.func, ast.Attribute):
                self._attribute(node.func, guarded, use)
            elif isinstance(node.func, ast.Name) and node.func.id not in self._local:
                module, name = self._imported.get(node.func.id, ("", ""))
                if module.startswith("megatron.") and name:
                    self.reads.add(Read(name=name, module=module, guarded=guarded, use=use))

    def _named_attribute(self, node: ast.AST) -> str | None:
        """Return the attribute's name in a call such as `getattr(object, "name")`; "" if a variable
        holds the name; None if the node is no such call.
        """
        if not isinstance(node, ast.Call):
            return None
        called = node.func
        if isinstance(called, ast.Name) and called.id in _BY_NAME and len(node.args) > 1:
            return self._constant(node.args[1])
        if isinstance(called, ast.Attribute) and called.attr in _OF_VARS and node.args:
            match called.value:
                case ast.Call(func=ast.Name(id="vars")):
                    return self._constant(node.args[0])
        return None

    def _constant(self, node: ast.AST | None) -> str:
        if isinstance(node, ast.Name):
            module, name = self._imported.get(node.id, ("", ""))
            is_ours = module.startswith(_PACKAGE) and name
            node = self._source.definitions.get(node.id) or (
                _source(module).definitions.get(name) if is_ours else None
            )
            return str(node.value) if isinstance(node, ast.Constant) else ""
        if isinstance(node, ast.JoinedStr):
            parts = [n.value if isinstance(n, ast.FormattedValue) else n for n in node.values]
            texts = [self._constant(part) for part in parts]
            return "".join(texts) if all(texts) else ""
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""

    def _pair(self, node: ast.Tuple) -> tuple[str, str] | None:
        """Return the first two items of a tuple if they are a module of Megatron and a name in it;
        else None.
        """
        texts = [self._constant(item) for item in node.elts[:2]]
        if len(texts) == 2 and texts[0].startswith("megatron.") and texts[1].isidentifier():
            return texts[0], texts[1]
        return None

    def _attribute(self, node: ast.Attribute, guarded: bool, use: str = "") -> None:
        """Note the attributes in a chain such as `a.b.c`; `use` is how the last one is used."""
        use = use or ("" if isinstance(node.ctx, ast.Load) else "!")
        names = [node.attr]
        root: ast.expr = node.value
        while isinstance(root, ast.Attribute):
            names.insert(0, root.attr)
            root = root.value
        holder: ast.expr | None = None
        if isinstance(root, ast.Name):
            if root.id in _DECLARED:
                return
            module, inner = self._imported.get(root.id, ("", ""))
            full_name = f"{module}.{inner}" if inner else module
            if root.id in self._local or not module:
                holder = root
            elif module.startswith(_PACKAGE) and _is_module(full_name):
                self.uses.add((full_name, names.pop(0)))
            elif module.startswith("megatron."):
                name = names.pop(0)
                self.reads.add(Read(name=name, module=full_name, guarded=guarded))
                # A name in a module can always be set.
                if not names and use not in ("", "!"):
                    self.reads.add(Read(name=name, module=full_name, guarded=guarded, use=use))
            elif not module.startswith(_PACKAGE):
                return
        for name in names:
            self._add(name, guarded, holder)
            if use and name is names[-1]:
                self._add(name, guarded, holder, use)
            holder = None

    def _name(self, name: str) -> None:
        if name in _DECLARED:
            return
        self.keeps = self.keeps or name in _KEEPING
        if name in self._local:
            return
        if name in self._source.definitions:
            self.uses.add((self._source.module, name))
        elif name in self._imported:
            module, inner = self._imported[name]
            if module.startswith(_PACKAGE) and inner and not _is_module(f"{module}.{inner}"):
                self.uses.add((module, inner))

    def _add(self, name: str, guarded: bool, holder: ast.expr | None, use: str = "") -> None:
        """Note that the code uses an attribute.
        `holder` is the expression of the attribute's object, None if that is unknown.
        """
        is_self = isinstance(holder, ast.Name) and holder.id == "self"
        self.keeps = self.keeps or _PACKAGE in name
        if _PACKAGE in name or name.startswith("__") or (is_self and name in self.our_names):
            return
        of_self = is_self and self._of_class
        self.reads.add(Read(name=name, of_self=of_self, guarded=guarded, use=use))


#: Functions that iterate over an argument.
_WALKS = {
    *("all", "any", "dict", "enumerate", "iter", "len", "list", "map", "max", "min", "next"),
    *("reversed", "set", "sorted", "sum", "tuple", "zip"),
}
#: Methods of a dictionary.
_OF_TABLES = frozenset({"get", "items", "keys", "pop", "setdefault", "update", "values"})


def _takes_apart(node: ast.expr, parents: Mapping[int, ast.AST], nodes: Sequence[ast.AST]) -> bool:
    """Tell if a value is unpacked, indexed or iterated over, directly or through a variable."""
    user = parents.get(id(node))
    if isinstance(user, ast.Assign) and user.value is node:
        (target, *_) = user.targets
        if isinstance(target, ast.Name) and isinstance(node, ast.Call):
            return any(
                isinstance(variable, ast.Name)
                and variable.id == target.id
                and isinstance(variable.ctx, ast.Load)
                and _takes_apart(variable, parents, ())
                for variable in nodes
            )
        return isinstance(target, (ast.Tuple, ast.List))
    if isinstance(user, ast.Call):
        called = user.func
        walks = isinstance(called, ast.Name) and called.id in _WALKS
        return walks and (node in user.args)
    return (
        (isinstance(user, (ast.For, ast.comprehension)) and user.iter is node)
        or (isinstance(user, ast.Subscript) and user.value is node)
        or (isinstance(user, ast.Dict) and node in user.values and None in user.keys)
        or (isinstance(user, ast.Attribute) and user.attr in _OF_TABLES)
        or isinstance(user, (ast.Starred, ast.YieldFrom))
    )


def _under(nodes: Iterable[ast.AST]) -> set[int]:
    return {id(inner) for node in nodes for inner in ast.walk(node)}
