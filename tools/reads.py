"""Derives from the code of wrappers which names of upstream's objects they read, call or set.

A wrapper is followed into every function of this package that it uses. A name counts wherever it
stands: as an attribute, in `getattr(object, "name")`, in `from megatron… import name`, in a table
of names that are asked for. So does what is done with it: an attribute that is set must be one that
can be, a keyword that is passed a parameter, and a result that is taken apart the same as before.

What upstream has to bind, and from which release on, is what the trees say that the patch was
decided for: a name that none of them has is ours, Python's or torch's; one that all have is needed,
however carefully the wrapper asks for it; one that came or went with a release is needed since, or
until, that release. `python tools/casebook.py` writes that into `reads.txt`.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401  # before what it finds

from megatron_idempotent.cli.needs import by_version, fits, merged, needs_of_names, versions_with
from megatron_idempotent.patching.base import MEGATRON, Record
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.moved import bases_of
from megatron_idempotent.patching.record import Patch
from megatron_idempotent.patching.surroundings import (
    Need,
    Needs,
    binds,
    bound_of,
    class_text,
    key_of,
    parameters,
    returned,
)
from megatron_idempotent.patching.trees import SourceTree

_PACKAGE = "megatron_idempotent"
#: What wrappers are made of. Nothing else of this package touches upstream for them.
_FOLLOWED = ("megatron_idempotent.patches.", "megatron_idempotent.megatron.")
#: Records in case files, which wrappers ask for their id.
_DECLARED = frozenset({"PATCH", "HELPER", "LIMIT"})
#: Calls whose second argument is the name of an attribute.
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr"})
#: Methods that `vars(object)` has, and whose first argument is the name of an attribute.
_OF_VARS = frozenset({"get", "pop", "setdefault"})


class Read(Record):
    """Names one thing of upstream's that a wrapper reads, calls or sets.

    Example:
        Read(module="megatron.core.parallel_state", name="model_parallel_is_initialized")
    """

    name: str
    module: str = ""
    """The module that has to bind it; empty for an attribute of an object."""
    of_self: bool = False
    """True for an attribute of the object whose method is wrapped."""
    guarded: bool = False
    """True if the wrapper copes with its absence, so far as one can see."""
    use: str = ""
    """A use beside reading it: `!` if it is set, `(keyword)` if it is called with that, `[]` if its
    result is taken apart."""


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
        """Methods that objects of ours have, whichever they are."""
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
    """Yield what an import in `module` binds: the name, and the module and name that it is of."""
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
    """Return what a wrapper reads, with all functions of this package that it uses.

    The second item says whether it keeps state of ours on upstream's objects.

    Args:
        wrapper: a plain function of a module.
        of_class: True if it stands around a method, so that its `self` is upstream's object.
    """
    found: set[Read] = set()
    waiting = [(wrapper.__module__, wrapper.__name__, of_class, "")]
    done = set()
    own: set[str] = set()
    keeps = False
    while waiting:
        place = waiting.pop()
        if place in done:
            continue
        done.add(place)
        module, name, owns, asked = place
        if not f"{module}.".startswith(_FOLLOWED):
            continue
        source = _source(module)
        if name in source.definitions:
            each = _Definition(source, source.definitions[name], owns, asked)
            found |= each.found
            keeps |= each.keeps
            own |= each.own | source.protocols
            waiting += [(m, n, False, each.asks_for(m, n)) for m, n in each.uses]
        elif name in source.imported:
            above, inner = source.imported[name]
            if above.startswith(_PACKAGE) and inner:
                waiting.append((above, inner, False, asked))
    return frozenset(each for each in found if each.module or each.name not in own), keeps


class _Definition:
    """Reads one function, class or constant.

    Args:
        source: the module that has it.
        root: its code.
        of_class: True if `self` is upstream's object.
        asked: what asks a table for names: `get` or `set` if attributes are then read or set by
            these; empty if nobody does.
    """

    def __init__(self, source: _Module, root: ast.AST, of_class: bool, asked: str = "") -> None:
        self._source, self._of_class = source, of_class
        self.found: set[Read] = set()
        self.uses: set[tuple[str, str]] = set()
        self.keeps = False
        nodes = [*ast.walk(root)]
        self.own: set[str] = set()
        if isinstance(root, ast.ClassDef):
            self.own = {
                n.attr
                for n in nodes
                if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                if isinstance(n.value, ast.Name) and n.value.id == "self"
            }
            self.own |= {n.name for n in root.body if isinstance(n, ast.FunctionDef)}
        self._imported = dict(source.imported)
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._imported.update(imports(node, source.module))
        self._local = {n.arg for n in nodes if isinstance(n, ast.arg)}
        self._local |= {
            n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        # Names of attributes are somewhere, if a call asks for one by a variable: here, or in a
        # table of the module.
        by_variable = [node for node in nodes if self._asks(node) == ""]
        sets = any(ast.unparse(node.func) == "setattr" for node in by_variable)  # type: ignore[attr-defined]
        self._asked = asked or ("set" if sets else "get" if by_variable else "")
        above = {id(child): node for node in nodes for child in ast.iter_child_nodes(node)}
        # Of `a.b.c`, the whole counts; annotations, and defaults of a function, tell nothing.
        chains = (n.value for n in nodes if isinstance(n, ast.Attribute))
        passed_by = {id(each) for each in chains if isinstance(each, ast.Attribute)}
        types = [getattr(n, kind, None) for n in nodes for kind in ("annotation", "returns")]
        types += [n.args for n in nodes if isinstance(n, ast.FunctionDef)]
        passed_by |= _under(filter(None, types))
        coped = _under(
            each for n in nodes if isinstance(n, ast.Try) and n.handlers for each in n.body
        )
        for node in nodes:
            if id(node) in passed_by:
                continue
            guarded = id(node) in coped
            if isinstance(node, ast.Call):
                self._call(node, guarded, _takes_apart(node, above, nodes))
            if isinstance(node, ast.Attribute):
                self._attribute(node, guarded)
            elif isinstance(node, ast.ImportFrom):
                for _, (module, name) in imports(node, source.module):
                    if module.startswith("megatron."):
                        self.found.add(Read(name=name, module=module, guarded=guarded))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self._name(node.id)
            elif isinstance(node, ast.Call) and (attribute := self._asks(node)):
                # A `getattr` with a default, `hasattr` and `vars` cope with its absence.
                called = node.func.id if isinstance(node.func, ast.Name) else ""
                strict = called in ("setattr", "delattr") or (
                    called == "getattr" and len(node.args) == 2
                )
                self._add(attribute, guarded or not strict, node.args[0])
                if called in ("setattr", "delattr"):
                    self._add(attribute, guarded, node.args[0], "!")
            elif isinstance(node, ast.Tuple) and (pair := self._pair(node)):
                self.found.add(Read(name=pair[1], module=pair[0], guarded=True))
                passed_by |= _under(node.elts[:2])
            elif self._asked and (text := self._constant(node)).isidentifier():
                self._add(text, True, None)
                if self._asked == "set":
                    self._add(text, True, None, "!")

    def asks_for(self, module: str, name: str) -> str:
        """Return how names in a table of this module are asked for here; empty if it is none."""
        table = self._source.definitions.get(name) if module == self._source.module else None
        is_table = isinstance(table, (ast.Tuple, ast.List, ast.Set, ast.Dict))
        return self._asked if is_table else ""

    def _call(self, node: ast.Call, guarded: bool, is_taken_apart: bool) -> None:
        """Note the keywords of a call of upstream's, and that its result is taken apart."""
        keywords = sorted(each.arg for each in node.keywords if each.arg is not None)
        uses = [*([f"({','.join(keywords)})"] if keywords else ()), *["[]"][:is_taken_apart]]
        for use in uses:
            if isinstance(node.func, ast.Attribute):
                self._attribute(node.func, guarded, use)
            elif isinstance(node.func, ast.Name) and node.func.id not in self._local:
                module, name = self._imported.get(node.func.id, ("", ""))
                if module.startswith("megatron.") and name:
                    self.found.add(Read(name=name, module=module, guarded=guarded, use=use))

    def _asks(self, node: ast.AST) -> str | None:
        """Return the attribute that a call asks for by its name; "" if it is a variable."""
        if not isinstance(node, ast.Call):
            return None
        called = node.func
        if isinstance(called, ast.Name) and called.id in _BY_NAME and len(node.args) > 1:
            return self._constant(node.args[1])
        if isinstance(called, ast.Attribute) and called.attr in _OF_VARS and node.args:
            of = called.value
            if isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "vars":
                return self._constant(node.args[0])
        return None

    def _constant(self, node: ast.AST | None) -> str:
        if isinstance(node, ast.Name):
            module, name = self._imported.get(node.id, ("", ""))
            ours = module.startswith(_PACKAGE) and name
            node = self._source.definitions.get(node.id) or (
                _source(module).definitions.get(name) if ours else None
            )
            return str(node.value) if isinstance(node, ast.Constant) else ""
        if isinstance(node, ast.JoinedStr):
            parts = [n.value if isinstance(n, ast.FormattedValue) else n for n in node.values]
            texts = [self._constant(part) for part in parts]
            return "".join(texts) if all(texts) else ""
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""

    def _pair(self, node: ast.Tuple) -> tuple[str, str] | None:
        """Return a module of upstream's and a name in it, if a tuple begins with these."""
        texts = [self._constant(each) for each in node.elts[:2]]
        if len(texts) == 2 and texts[0].startswith("megatron.") and texts[1].isidentifier():
            return texts[0], texts[1]
        return None

    def _attribute(self, node: ast.Attribute, guarded: bool, use: str = "") -> None:
        """Note the attributes of a chain; with a use, the last of them alone for that."""
        use = use or ("" if isinstance(node.ctx, ast.Load) else "!")
        names = [node.attr]
        root: ast.expr = node.value
        while isinstance(root, ast.Attribute):
            names.insert(0, root.attr)
            root = root.value
        of: ast.expr | None = None
        if isinstance(root, ast.Name):
            if root.id in _DECLARED:
                return
            module, inner = self._imported.get(root.id, ("", ""))
            whole = f"{module}.{inner}" if inner else module
            if root.id in self._local or not module:
                of = root
            elif module.startswith(_PACKAGE) and _is_module(whole):
                self.uses.add((whole, names.pop(0)))
            elif module.startswith("megatron."):
                name = names.pop(0)
                self.found.add(Read(name=name, module=whole, guarded=guarded))
                # A name of a module can be set in any case.
                if not names and use not in ("", "!"):
                    self.found.add(Read(name=name, module=whole, guarded=guarded, use=use))
            elif not module.startswith(_PACKAGE):
                return
        for name in names:
            self._add(name, guarded, of)
            if use and name is names[-1]:
                self._add(name, guarded, of, use)
            of = None

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

    def _add(self, name: str, guarded: bool, of: ast.expr | None, use: str = "") -> None:
        is_self = isinstance(of, ast.Name) and of.id == "self"
        self.keeps = self.keeps or _PACKAGE in name
        if _PACKAGE in name or name.startswith("__") or (is_self and name in self.own):
            return
        is_own = is_self and self._of_class
        self.found.add(Read(name=name, of_self=is_own, guarded=guarded, use=use))


#: Functions that go through what they are given.
_WALKS = {
    *("all", "any", "dict", "enumerate", "iter", "len", "list", "map", "max", "min", "next"),
    *("reversed", "set", "sorted", "sum", "tuple", "zip"),
}
#: Methods of a dictionary.
_OF_TABLES = frozenset({"get", "items", "keys", "pop", "setdefault", "update", "values"})


def _takes_apart(node: ast.expr, above: Mapping[int, ast.AST], nodes: Sequence[ast.AST]) -> bool:
    """Tell if a value is unpacked, indexed or gone through, where it stands or by its name."""
    user = above.get(id(node))
    if isinstance(user, ast.Assign) and user.value is node:
        (target, *_) = user.targets
        if isinstance(target, ast.Name) and isinstance(node, ast.Call):
            return any(
                isinstance(each, ast.Name)
                and each.id == target.id
                and isinstance(each.ctx, ast.Load)
                and _takes_apart(each, above, ())
                for each in nodes
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
    return {id(each) for node in nodes for each in ast.walk(node)}


#: Names of ours that say that a wrapper keeps something about an object of upstream's.
_KEEPING = frozenset({"PerProcessWeakKeys", "WeakKeyDictionary", "ref", "vars"})
_UPSTREAM = ("megatron.core.", "megatron.training.")
#: If more modules than this define a name, a few are looked at.
_MANY, _FEW = 6, 3


def derived(patch: Patch) -> tuple[frozenset[tuple[Read, str]], bool]:
    """Return what a patch's wrappers read, each with the class that it is an attribute of.

    The second item says whether they keep state of ours on upstream's objects.
    """
    found: set[tuple[Read, str]] = set()
    keeps = False
    for target in patch.targets:
        owner = target.qualname.rpartition(".")[0]
        reads, more = reads_of(target.wrapper, of_class=bool(owner))
        keeps |= more
        found |= {
            (each, f"{target.module}:{owner}" if each.of_self and owner else "") for each in reads
        }
    return frozenset(found), keeps


def renewed(
    known: Mapping[str, Needs], trees: Iterable[SourceTree], ids: Collection[str] | None = None
) -> dict[str, Needs]:
    """Return what `reads.txt` has to say, by patch.

    Args:
        known: what it says. What wrappers no longer read is left out, and releases that are none of
            the trees stay as they are.
        trees: sources of Megatron, which say where a name is bound that is new.
        ids: the patches to renew, whose bodies in these trees a person has read; None for all
            patches, as far as their bodies are known there.
    """
    order = by_version(trees)
    found = {name: each for name, each in known.items() if ids is not None and name in patches()}
    for patch in patches().values():
        if patch.distribution == MEGATRON and (ids is None or patch.id in ids):
            fitting = [tree for tree in order if fits(patch, tree, read=ids is not None)]
            found[patch.id] = needs_of(patch, fitting, known.get(patch.id), accepts=ids is not None)
    return found


def needs_of(
    patch: Patch, trees: Sequence[SourceTree], known: Needs | None, *, accepts: bool = False
) -> Needs:
    """Return what a patch needs of upstream.

    Args:
        patch: the patch.
        trees: those that it fits, the oldest first.
        known: what it needed before.
        accepts: True if a person has read these trees for the patch, and so accepts what they do
            to a use of a name.
    """
    reads, keeps = derived(patch)
    before: dict[tuple[str, str], list[Need]] = {}
    for need in known.names if known is not None else ():
        bare = need.name.lstrip(".") or need.modules[0].rpartition(".")[2]
        before.setdefault((bare, _kind(need.use)), []).append(need)
    # First, because `known` may have names that nobody knew then to be of others.
    reads = frozenset(
        (read, of) for read, of in reads if read.module or of or read.name not in elsewhere()
    )
    needs: set[Need | None] = set()
    for name, use in sorted({(read.name, read.use) for read, _ in reads}):
        if (name, _kind(use)) in before:
            for need in before[name, _kind(use)]:
                needs |= merged(need, trees) if accepts or not need.use else {need}
            continue
        for read, of in sorted(reads, key=str):
            if (read.name, read.use) == (name, use):
                needs |= set(_needs(read, of, patch, trees, known is not None and read.guarded))
    return needs_of_names(filter(None, needs), keeps=keeps)


def _kind(use: str) -> str:
    """Return a use without its hashes, by which `reads.txt` knows it again."""
    return "[]" if use.startswith("[") else use


def _needs(
    read: Read, of: str, patch: Patch, trees: Sequence[SourceTree], only_here: bool
) -> Iterator[Need | None]:
    """Yield the needs of a read that is new, with the releases that have them."""
    if not read.use:
        for place in _places_of(read, of, patch, trees):
            yield _bounded(place, trees, only_here)
        return
    for module, owner in _definitions(read, of, patch, trees):
        use = read.use
        if use == "[]":
            made = (returned(tree.text(module) or "", owner, read.name) for tree in trees)
            hashes = sorted(set(filter(None, made)))
            if not hashes:
                continue
            use = f"[{'|'.join(hashes)}]"
        need = Need(modules=(module,), owner=owner, name=read.name, use=use)
        # What a release does not allow, for which the patch is right, the wrapper copes without.
        answers = {need.is_allowed(tree) for tree in trees}
        if False not in answers:
            yield need if True in answers else None
        elif True in answers:
            allowing = [key_of(t.versions[MEGATRON]) for t in trees if need.is_allowed(t)]
            lacking = [key_of(t.versions[MEGATRON]) for t in trees if need.is_allowed(t) is False]
            later = [key for key in allowing if key > max(lacking)]
            if later:
                yield Need(**{**vars(need), "since": bound_of(min(later))})


def _definitions(
    read: Read, of: str, patch: Patch, trees: Sequence[SourceTree]
) -> list[tuple[str, str]]:
    """Return the modules and classes that define what a read sets or calls: the nearest ones.

    First of all the wrapped classes count, with their bases, then all classes in their modules,
    then all others. Where many define the name, nobody knows which of them is meant.
    """
    if read.module:
        modules, owner, _ = _imported(read, trees)
        return [(modules[0], owner)]
    module, _, wrapped = of.partition(":")
    owners = {(t.module, t.qualname.rpartition(".")[0]) for t in patch.targets}
    owners = {(module, wrapped)} if of else {each for each in owners if each[1]}
    near = sorted(owners | {base for each in owners for base in _bases(*each, trees)})
    homes = sorted({t.module for t in patch.targets})
    everywhere = {m: None for tree in trees for m in tree.modules if m.startswith(_UPSTREAM)}
    beside = ((m, c) for m in homes for c in _classes_anywhere(m, read.name, trees))
    anywhere = ((m, c) for m in everywhere for c in _classes_anywhere(m, read.name, trees))
    for candidates in (near, beside, anywhere):
        defining = [
            (m, c) for m, c in candidates if any(_defines(t.text(m), c, read) for t in trees)
        ]
        if defining:
            # A name in a table may be one that is only read.
            return defining if len(defining) <= (_FEW if read.guarded else 2 * _MANY) else []
    return []


def _classes_anywhere(module: str, name: str, trees: Sequence[SourceTree]) -> list[str]:
    texts = {text for tree in trees if name in (text := tree.text(module) or "")}
    return list(dict.fromkeys(c for text in texts for c in _classes_that_bind(text, name)))


def _defines(text: str | None, owner: str, read: Read) -> bool:
    if not text or not binds(text, owner, read.name):
        return False
    return read.use == "!" or parameters(text, owner, read.name) is not None


def _places_of(read: Read, of: str, patch: Patch, trees: Sequence[SourceTree]) -> list[_Place]:
    if read.module:
        return [_imported(read, trees)]
    module, _, owner = of.partition(":")
    if of:
        found: list[_Place] = [
            ((where,), each, read.name)
            for where, each in ((module, owner), *_bases(module, owner, trees))
            if any(_binds(((where,), each, read.name), tree) for tree in trees)
        ]
        if found:
            return found
    if read.name in elsewhere():
        return []
    owners = {(t.module, t.qualname.rpartition(".")[0]) for t in patch.targets}
    owners |= {base for each in owners for base in _bases(*each, trees)}
    return _places(read.name, sorted({t.module for t in patch.targets}), owners, trees)


def _bases(module: str, owner: str, trees: Sequence[SourceTree]) -> list[tuple[str, str]]:
    """Return the base classes of a class that its folder has, by module and name."""
    found: dict[tuple[str, str], None] = {}
    for tree in trees[-1:] if owner else ():
        for name in bases_of(tree.text(module) or "", owner):
            base = name.rpartition(".")[2]
            for home in tree.beside(module):
                if class_text(tree.text(home) or "", base) and (home, base) not in found:
                    found |= dict.fromkeys([(home, base), *_bases(home, base, trees)])
    return list(found)


_Place = tuple[tuple[str, ...], str, str]
"""Modules, class and name, as in `Need`."""


def _binds(place: _Place, tree: SourceTree) -> bool:
    modules, owner, name = place
    return Need(modules=modules, owner=owner, name=name).is_met(tree)


def _imported(read: Read, trees: Sequence[SourceTree]) -> _Place:
    if any(tree.text(f"{read.module}.{read.name}") is not None for tree in trees):
        return (f"{read.module}.{read.name}",), "", ""
    if any(tree.text(read.module) is not None for tree in trees):
        return (read.module,), "", read.name
    module, _, owner = read.module.rpartition(".")
    return (module,), owner, read.name


def _places(
    name: str, near: Sequence[str], owners: Iterable[tuple[str, str]], trees: Sequence[SourceTree]
) -> list[_Place]:
    """Return where an attribute of any object is bound.

    First of all the wrapped classes count, then their modules, then all others; and before code
    that sets it on another's object, what defines it. Where only that is near, the one class that
    has always defined it counts, too.
    """
    found: list[_Place] = [
        ((module,), owner, name)
        for module, owner in sorted(owners)
        if owner and any(_binds(((module,), owner, name), tree) for tree in trees)
    ]
    defined = found or _in_modules(name, near, trees)
    if defined:
        return defined
    everywhere = _in_modules(name, (), trees)
    set_here = _in_modules(f".{name}", near, trees)
    if not set_here:
        return everywhere
    always = [each for each in everywhere if all(_binds(each, tree) for tree in trees)]
    return [*set_here, *(each for each in always if each[1])]


def _in_modules(name: str, near: Sequence[str], trees: Sequence[SourceTree]) -> list[_Place]:
    """Return where these modules, or all of them, bind a name in the newest tree that has it.

    Where many do, a few stand for all.
    """
    for tree in reversed(trees):
        all_of_them = near or [m for m in tree.modules if m.startswith(_UPSTREAM)]
        here = [m for m in all_of_them if binds(tree.text(m) or "", "", name)]
        if len(here) > _MANY:
            # Those that always have it tell; those with settings first.
            always = [m for m in here if all(_binds(((m,), "", name), each) for each in trees)]
            always.sort(key=lambda module: not module.endswith("_config"))
            return [(tuple(sorted(always[:_FEW])), "", name)] if always else []
        classes = [(m, c) for m in here for c in _classes_that_bind(tree.text(m) or "", name)]
        if len(here) == len(classes) == 1:
            return [((here[0],), classes[0][1], name)]
        if here:
            return [(tuple(here), "", name)]
    return []


def _classes_that_bind(text: str, name: str) -> list[str]:
    names = dict.fromkeys(re.findall(r"^class (\w+)", text, re.MULTILINE))
    return [owner for owner in names if binds(text, owner, name)]


def _bounded(place: _Place, trees: Sequence[SourceTree], only_here: bool) -> Need | None:
    """Return the need of a name with the releases that have it; None if no rule says which.

    Args:
        place: where it is bound.
        trees: those that the patch fits.
        only_here: True if nothing may be asked of releases before these.
    """
    modules, owner, name = place
    has, lacks = versions_with(Need(modules=modules, owner=owner, name=name), trees)
    if not has:
        return None
    since = before = ""
    if lacks:
        later = {key for key in has if key > max(lacks)}
        if later:
            since = bound_of(min(later))
        elif min(has) < min(lacks):
            before = bound_of(min(lacks))
        else:
            return None
    elif only_here:
        since = bound_of(min(has))
    return Need(modules=modules, owner=owner, name=name, since=since, before=before)


@lru_cache(maxsize=1)
def elsewhere() -> frozenset[str]:
    """Return names that Python's and torch's objects have, which tell nothing of upstream."""
    import enum
    import functools
    import hashlib
    import logging
    import threading
    import types

    import torch
    from torch.distributed.checkpoint import filesystem

    kinds: tuple[type, ...] = (
        *(dict, list, set, str, bytes, int, type, types.FunctionType, types.FrameType),
        *(types.CodeType, types.TracebackType, types.ModuleType, types.MethodType),
        *(torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.cuda.Stream),
        *(torch.utils.hooks.RemovableHandle, torch.distributed.Work, torch.autograd.Function),
        *(functools.partial, enum.Enum, logging.Logger, type(hashlib.sha256()), threading.Thread),
    )
    stored = filesystem._StorageInfo.__dataclass_fields__
    instances = {"parameters", "param_groups", "path", *stored}
    return frozenset(name for kind in kinds for name in dir(kind)) | instances
