"""Checks that the sources on the path have the names that wrappers use.

Reviewing the body of a wrapped function does not cover other objects that the wrapper uses. So
`reads.txt` lists, for each patch, the attributes, methods and functions of upstream that its
wrappers read, call or set; `tools/reads.py` derives them from the wrappers' code. A patch is
refused, with the name in the reason, if one of them is missing, if a class on whose objects we
keep state has `__slots__`, or if code in the sources bypasses the patched function: a subclass
with a method of its own, a second name, a table that refers to it.

Some names are not only read. `name!` in `reads.txt` is an attribute that a wrapper sets: it must
not be a property without a setter, or of a frozen dataclass, or missing in `__slots__`.
`name(keyword)` is a function that a wrapper calls with the keyword: it must have that parameter.
`name[hash]` is a function whose result a wrapper unpacks or indexes: a person must have reviewed
the statements that make the result.

Each name takes one search of a module's text. Code is parsed only if the search finds the name.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from .base import Record, generated
from .contract import BodyPart
from .moved import bases_of
from .source import canonical, digest, layout, parse_body

if TYPE_CHECKING:
    from .record import Patch, Target
    from .releases import Installed, Sources

READS = "reads.txt"
PRE, KEEPS = "rc", "keeps"
"""The end of a bound that commits meet, and the mark of a patch whose wrappers keep state."""


class Need(Record):
    """A name that a wrapper reads from Megatron, and the module or class that must define it.

    Example:
        Need(modules=("megatron.core.timers",), owner="Timer", name="_started")
    """

    modules: tuple[str, ...]
    """The modules of which one has to bind the name."""
    owner: str
    """The class that has to bind the name; empty for the module, or any class in it."""
    name: str
    """The name, such as `Timers`; `.main_grad` for an attribute that upstream sets on objects of
    another class; empty if the wrapper only imports the module."""
    since: str = ""
    """The first release that binds the name, such as `0.16.0`; `0.16.0rc` if commits that lead to
    that release bind it, too."""
    before: str = ""
    """The first release that no longer binds the name."""
    use: str = ""
    """A use besides reading, which the definitions of the name have to allow: `!` if the wrapper
    sets it, `(keyword)` if it calls it with a keyword, `[hash]` if it unpacks the result."""
    excused: bool = False
    """True if commits that a person has reviewed lack the name: `name?` in `reads.txt`."""

    def covers(self, key: tuple[tuple[int, ...], bool]) -> bool:
        """Return True if sources of the version with this key (`key_of`) must define the name."""
        return not (
            (self.since and key < _key(self.since)) or (self.before and key >= _key(self.before))
        )

    def is_met(self, sources: Sources) -> bool:
        """Return True if the sources fulfil this need. If `use` is empty, they have to define the
        name. Otherwise no definition of the name may forbid that use; a name that is not defined is
        accepted.
        """
        if self.use:
            return self.is_allowed(sources) is not False
        texts = (sources.text(module) for module in self.modules)
        return any(text is not None and binds(text, self.owner, self.name) for text in texts)

    def is_allowed(self, sources: Sources) -> bool | None:
        """Tell if all definitions of the name in the sources allow the wrapper's use of it.
        Return None if the sources do not define the name.
        """
        texts = (sources.text(module) for module in self.modules)
        answers = {fits(text, self.owner, self.name, self.use) for text in texts if text}
        return None if answers <= {None} else False not in answers

    def __str__(self) -> str:
        place_text = " or ".join(self.modules)
        if not self.name:
            return f"{place_text} is not there, and its wrapper imports it"
        place_text += f":{self.owner}" if self.owner else ""
        if self.use:
            refusal = _USES[self.use[0]].refusal
            return refusal.format(place=place_text, name=self.name, details=self.use[1:-1])
        verb = "sets" if self.name.startswith(".") else "defines"
        return f"{place_text} {verb} no `{self.name.lstrip('.')}`, which its wrapper reads"


class Needs(Record):
    """Holds the names of upstream's code that the wrappers of one patch use."""

    names: tuple[Need, ...] = ()
    keeps: bool = False
    """True if the wrappers set attributes of our own on upstream's objects."""


def key_of(version: Installed) -> tuple[tuple[int, ...], bool]:
    """Return a key that sorts versions, a release after the commits that lead to it."""
    return version.release, version.text.replace(".", "").isdecimal()


def _key(bound: str) -> tuple[tuple[int, ...], bool]:
    plain = bound.removesuffix(PRE)
    return tuple(map(int, plain.split("."))), plain == bound


_table: dict[str, Needs] = {}


def table() -> dict[str, Needs]:
    """Return the contents of `reads.txt`: by patch id, the names of upstream that the patch's
    wrappers use.
    """
    if not _table:
        _table.update(parsed(generated(READS)))
    return _table


#: A name in `reads.txt`, and the fields of its `Need`.
_ENTRY = re.compile(
    r"(?P<name>\.?\w*)(?P<use>!|\([\w,]+\)|\[[\w|]+\])?"
    r"(?:>=(?P<since>[\w.]+))?(?:<(?P<before>[\w.]+))?(?P<excused>\??)"
)


def parsed(lines: list[str]) -> dict[str, Needs]:
    """Parse lines of `reads.txt`. Return, by patch id, the names of upstream that the patch's
    wrappers use.
    """
    names_of: dict[str, list[Need]] = {}
    keeping = set()
    patch_id = ""
    for line in lines:
        place_text, *entries = line.split()
        if not line.startswith(" "):
            patch_id = place_text
            names_of[patch_id] = []
            keeping |= {patch_id} if entries == [KEEPS] else set()
            continue
        modules, _, owner = place_text.partition(":")
        for entry in entries or [""]:
            fields: dict[str, Any] = _ENTRY.fullmatch(entry).groupdict("")  # type: ignore[union-attr]
            fields |= {"modules": tuple(modules.split("|")), "excused": bool(fields["excused"])}
            names_of[patch_id].append(Need(owner=owner, **fields))
    return {
        name: Needs(names=tuple(needs), keeps=name in keeping) for name, needs in names_of.items()
    }


def unmet(
    patch: Patch, release: Installed | None, sources: Sources, *, of_commit: bool = False
) -> str | None:
    """Check that the sources have the names that a patch's wrappers use, and no code that bypasses
    the wrappers. Return the first fault as a text for the verdict's reason; None if there is none.

    Args:
        patch: the patch.
        release: the release of the sources. None for a commit, which has to bind the names that
            some release in the patch's range has to: wrappers work with each of these releases.
        sources: the modules to search.
        of_commit: True if no release has one of the wrapped bodies; then excused needs are skipped.
    """
    needs = table().get(patch.id, Needs())
    names = [need for need in needs.names if not (of_commit and need.excused)]
    keys = _borders(patch, names) if release is None else [key_of(release)]
    lacking = [
        next((n for n in names if n.covers(key) and not n.is_met(sources)), None) for key in keys
    ]
    if None not in lacking:
        return str(lacking[0])
    own_classes = _classes_of(patch)
    named_classes = {(need.modules[0], need.owner) for need in needs.names if need.owner}
    for module, owner in sorted(own_classes | named_classes) if needs.keeps else ():
        text = sources.text(module) or ""
        if slots_of(text, owner) is not None:
            return f"{module}:{owner} has __slots__, so that its wrappers can keep nothing on it"
        if (module, owner) in own_classes and is_frozen(text, owner):
            return f"{module}:{owner} is frozen, so that its wrappers can keep nothing on it"
    return next(
        (detour for target in patch.targets for detour in _detours(target, patch, sources)), None
    )


def _borders(patch: Patch, needs: Iterable[Need]) -> list[tuple[tuple[int, ...], bool]]:
    """Return the keys (`key_of`) of the versions to check, newest first: the first version in the
    patch's range, and within the range each version from which on one of `needs` begins or ceases
    to apply.
    """
    first, end = _key(patch.since or "0"), _key(patch.before)
    bounds = {_key(bound) for need in needs for bound in (need.since, need.before) if bound}
    return [*sorted((key for key in bounds if first < key < end), reverse=True), first]


def _classes_of(patch: Patch) -> set[tuple[str, str]]:
    """Return (module, class) of each class with a method that the patch wraps."""
    owners = {(target.module, target.qualname.rpartition(".")[0]) for target in patch.targets}
    return {(module, owner) for module, owner in owners if owner}


@lru_cache(maxsize=8192)  # a dozen patches read the same few names
def binds(text: str, owner: str, name: str) -> bool:
    """Tell if a module's source, or one class in it, binds a name.

    A definition, an import, a variable of the module or class, and `self.name = …` bind it. A name
    like `.main_grad` is bound by setting that attribute on any object.
    """
    if not name:
        return True
    bare = name.lstrip(".")
    text = class_text(text, owner) if owner else text
    return any(_binds(text, *span, of_any=bare != name) for span in words(text, bare))


def words(text: str, name: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end offsets of each occurrence of a name as a whole word, without a
    regex.
    """
    start = text.find(name)
    while start >= 0:
        end = start + len(name)
        neighbours = text[start - 1 : start] + text[end : end + 1]
        if not any(letter.isalnum() or letter == "_" for letter in neighbours):
            yield start, end
        start = text.find(name, end)


#: A line that binds names; the name is in one of the groups. Without a space before it, an equals
#: sign after a comma may be that of a keyword, in a call that began on a line before.
_BINDING = re.compile(
    r"[ \t]*(?:(?:async )?(?:def|class) (?P<definition>\w+)"
    r"|(?:from|import)\b(?P<imported>.*)"
    r"|(?:global |.*\bsetattr\([^,\n]+,\s*[\"'])(?P<set>\w+)"
    r"|(?P<annotated>\w+)[ ]*:[ ]*\S"
    r"|(?P<assigned>[\w. \[\]'\"]+?)[ ]*(?::[^=\n]*)?[|+]?=(?!=)"
    r"|(?P<unpacked>[\w. ,()\[\]'\"*]+?) =(?!=))"
)
#: The end of a tuple, on several lines, that is the target of an assignment.
_IN_A_TUPLE = re.compile(r",[\w\s.,]*\)\s*=(?!=)")
#: The beginnings of statements whose blocks have the scope of the module or class.
_OPEN = ("class ", "from ", "if ", "elif ", "else", "try", "except", "finally", "with ")


def _binds(text: str, start: int, end: int, *, of_any: bool) -> bool:
    """Tell if the line with a name between two offsets binds the name, `of_any` object."""
    begin = text.rfind("\n", 0, start) + 1
    line = _BINDING.match(text, begin)
    group = line.lastgroup if line is not None else None
    if line is None or group is None or not line.start(group) <= start < line.end(group):
        group = None
    if group in ("definition", "set"):
        return group == "set" or not of_any
    if text.endswith(".", begin, start):  # `self.name: int = 1`, `a.name, b.name = 1, 2`
        is_assigned = group in ("assigned", "unpacked") or _IN_A_TUPLE.match(text, end) is not None
        return is_assigned and (of_any or text.endswith("self.", begin, start))
    if of_any or not _is_outside(text, begin, start):
        return False
    opened = max(text.rfind("import (", 0, start), text.rfind("import(", 0, start))
    return group is not None or opened > text.rfind(")", 0, start)


def _is_outside(text: str, begin: int, start: int) -> bool:
    """Tell if a line of a source text is in a module's or class's scope, not in a function."""
    depth = start - begin - len(text[begin:start].lstrip())
    if not depth:
        return True
    heads = layout(text).heads
    head_start = heads[max(0, bisect_right(heads, begin) - 1)]
    head = text[head_start : head_start + 10]
    return head.startswith(_OPEN) and (depth == 4 or not head.startswith("class "))


@lru_cache(maxsize=256)
def class_text(text: str, owner: str) -> str:
    """Return the source of all classes named `owner` in a module's text, decorators included."""
    definitions, _, heads = layout(text)
    parts = []
    for line in definitions.get(owner, ()):
        if line.is_class:
            first = bisect_left(heads, line.start)
            while first and text.startswith("@", heads[first - 1]):
                first -= 1
            start, end = min(line.start, heads[first]), heads[bisect_right(heads, line.end)]
            parts.append(text[start:end])
    return "\n".join(parts)


_INDENTATION = re.compile(r"\n([ \t]+)\S")
_FIRST_NAME = re.compile(r"(?:(?:async )?def |class )?(\w*)")


@lru_cache(maxsize=256)
def members(text: str, owner: str) -> dict[str, list[str]]:
    """Return the statements of a module, or of the classes named `owner` in it: their sources,
    decorators included, by the name that they define, which is the first in them.

    The text is cut at the lines with the least indentation. Such lines of a docstring are returned,
    too, although they are no statements.
    """
    indentation = ""
    if owner:
        text = class_text(text, owner)
        first = _INDENTATION.search(text, text.find(f"class {owner}"))
        if first is None:
            return {}
        indentation = first[1]
    # A comment, bracket or quote with the least indentation belongs to the statement above it.
    starts = re.finditer(rf"^{indentation}(?=[\w@(\[*])", text, re.MULTILINE)
    sources: dict[str, list[str]] = {}
    decorators = ""
    for start, end in pairwise([*(start.end() for start in starts), len(text)]):
        source = decorators + text[start:end]
        decorators = source if text[start] == "@" else ""
        if not decorators:
            name = _FIRST_NAME.match(text, start)
            sources.setdefault(name[1] if name else "", []).append(source)
    return sources


@lru_cache(maxsize=1024)
def slots_of(text: str, owner: str) -> frozenset[str] | None:
    """Return the names in a class's `__slots__`. Return None if the class's objects have a
    `__dict__`: the class has no slots, or a base class has none.
    """
    if "slots" not in class_text(text, owner):
        return None
    declaration = "".join(members(text, owner).get("__slots__", ()))
    slots = re.findall(r"[\"'](\w+)[\"']", declaration)
    if _is_declared(text, owner, "slots"):  # a dataclass makes the slots from its fields
        slots += _fields(text, owner)
    elif not declaration:
        return None
    bases = {base.rpartition(".")[2] for base in bases_of(text, owner)}
    bases -= {"object", "ABC", "Generic", "Protocol"}
    has_dict = "__dict__" in slots or any(slots_of(text, base) is None for base in bases)
    return None if has_dict else frozenset(slots)


def _fields(text: str, owner: str) -> list[str]:
    """Return the names that a class annotates, which are the fields of a dataclass."""
    return [
        name
        for name, sources in members(text, owner).items()
        if any(source[len(name) :].lstrip().startswith(":") for source in sources)
    ]


@lru_cache(maxsize=1024)
def is_frozen(text: str, owner: str) -> bool:
    """Tell if no attribute of a class's objects can be set: a frozen dataclass, a NamedTuple."""
    return _is_declared(text, owner, "frozen") or "NamedTuple" in bases_of(text, owner)


def _is_declared(text: str, owner: str, option: str) -> bool:
    """Tell if a decorator sets an option of a class, as `@dataclass(frozen=True)` does."""
    class_lines = class_text(text, owner)
    decorators = class_lines[: class_lines.find(f"class {owner}")]
    return re.search(rf"\b{option}\s*=\s*True", decorators) is not None


#: A property that a decorator or a call makes, without a function that sets it.
_PROPERTY = re.compile(
    r"^[ \t]*@(?:\w+\.)*(?:abstract)?property\s*$|^\w+\s*(?::[^=\n]*)?=\s*property\([^,\n]*\)",
    re.MULTILINE,
)


@lru_cache(maxsize=1024)
def _may_be_set(text: str, owner: str, name: str, _: str) -> bool | None:
    if not any(words(class_text(text, owner), name)):
        return None
    if is_frozen(text, owner):
        return False
    slots = slots_of(text, owner)
    if slots is not None:
        return name in slots
    definitions = members(text, owner).get(name, ())
    is_property = any(map(_PROPERTY.search, definitions))
    return not is_property or any(f"@{name}.setter" in source for source in definitions)


@lru_cache(maxsize=1024)
def parameters(text: str, owner: str, name: str) -> frozenset[str] | None:
    """Return the parameters of a function or of a class's constructor.

    `**` among them stands for any other keyword. None means that the module does not define it.
    """
    body = parse_body(text, f"{owner}.{name}" if owner else name)
    if body is None and not owner and class_text(text, name):
        body = parse_body(text, f"{name}.__init__")
        if body is None:
            # Fields of a dataclass; a base class may have others.
            return frozenset([*_fields(text, name), *(["**"] if bases_of(text, name) else [])])
    if body is None:
        return None
    return frozenset([*body.parameters, *(["**"] if body.tree.args.kwarg else [])])


def _takes(text: str, owner: str, name: str, keywords: str) -> bool | None:
    known = parameters(text, owner, name)
    return None if known is None else "**" in known or known.issuperset(keywords.split(","))


@lru_cache(maxsize=256)
def returned(text: str, owner: str, name: str) -> str | None:
    """Return a hash of the statements of a function that make its result. Return None if the module
    or class does not define the function.
    """
    body = parse_body(text, f"{owner}.{name}" if owner else name)
    if body is None:
        return None
    kinds = (ast.Return, ast.Yield, ast.YieldFrom)
    results = [node for node in body.own_nodes if isinstance(node, kinds)]
    results.sort(key=lambda node: (node.lineno, node.col_offset))
    part = BodyPart(body, map(ast.unparse, results), ())
    return digest("\n".join([part.hash, *map(canonical, results)]))


def _returns(text: str, owner: str, name: str, hashes: str) -> bool | None:
    result_hash = returned(text, owner, name)
    return None if result_hash is None else result_hash in hashes.split("|")


class _Use(NamedTuple):
    """Holds a use other than reading: its check, and the text if a definition forbids it."""

    is_allowed: Callable[[str, str, str, str], bool | None]
    """Takes a module's text, the class, the name, and the details: what `use` has in brackets."""
    refusal: str


#: The first character of `Need.use` → the use.
_USES = {
    "!": _Use(_may_be_set, "{place} lets nobody set `{name}`, which its wrapper does"),
    "(": _Use(_takes, "{place}.{name} takes no `{details}`, which its wrapper passes"),
    "[": _Use(_returns, "{place}.{name} returns something else, which its wrapper takes apart"),
}


def fits(text: str, owner: str, name: str, use: str) -> bool | None:
    """Return whether the definition of a name in a module or class allows what a wrapper does with
    it: set it, call it with certain keywords, or unpack its result. Return None if it is not
    defined there.

    Args:
        text: the module's source.
        owner: the class; empty for the module.
        name: the name.
        use: `!`, or `(…)` with keywords, or `[…]` with hashes.
    """
    return _USES[use[0]].is_allowed(text, owner, name, use[1:-1])


def _detours(target: Target, patch: Patch, sources: Sources) -> Iterator[str]:
    """Yield a text for each piece of code that bypasses a wrapper around the target function: an
    assignment in its module or class that refers to the function, or a subclass whose method
    overrides it without calling it.
    """
    owner, _, name = target.qualname.rpartition(".")
    text = sources.text(target.module) or ""
    for clause in _held(text, owner, name):
        yield f"{target.module} holds {target.qualname} a second time, at `{clause}`"
    our_addresses = {own_target.address for own_target in patch.targets}
    for module in sources.beside(target.module) if owner and not name.startswith("__") else ():
        heir_text = sources.text(module) or ""
        for heir in _heirs(heir_text).get(owner, ()):
            overrides = _overrides(heir_text, heir, name)
            if overrides and f"{module}:{heir}.{name}" not in our_addresses:
                yield f"{module}:{heir} overrides {target.qualname}, and does not call it"


@lru_cache(maxsize=128)
def _heirs(text: str) -> dict[str, list[str]]:
    """Return, for each name in the bases of a module's classes, the classes that have it there."""
    heirs: dict[str, list[str]] = {}
    # An indented class may be an example in a docstring.
    for heir, bases in re.findall(r"^class (\w+)\(([^)]*)\)", text, re.MULTILINE):
        for base in re.findall(r"\w+", bases):
            heirs.setdefault(base, []).append(heir)
    return heirs


def _overrides(text: str, owner: str, name: str) -> bool:
    """Tell if a class assigns a name, or defines it as a method that does not call another one of
    that name.
    """
    return any(
        f".{name}(" not in source if _DEFINES.match(source) else _ASSIGNED.match(source)
        for source in members(text, owner).get(name, ())
    )


_ASSIGNED = re.compile(r"\w+\s*(?::[^=\n]*)?=(?!=)")


_DEFINES = re.compile(r"@|(?:def|class|async|import|from)\b")


@lru_cache(maxsize=1024)
def _held(text: str, owner: str, name: str) -> tuple[str, ...]:
    """Return the source of each assignment that refers to a function without calling it, so that it
    keeps the unpatched function. Only the function's module, or its class, is searched.
    """
    sources = (source for sources in members(text, owner).values() for source in sources)
    if not any(_mentions(source, name) for source in sources if not _DEFINES.match(source)):
        return ()  # so the module is not parsed
    try:
        scopes: list[Any] = [ast.parse(text)]
    except SyntaxError:
        return ()
    if owner:
        scopes = [n for n in scopes[0].body if isinstance(n, ast.ClassDef) and n.name == owner]
    return tuple(
        ast.unparse(statement).splitlines()[0][:80]
        for scope in scopes
        for statement in scope.body
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and _refers(statement.value, name)
    )


def _mentions(text: str, name: str) -> bool:
    """Tell if a text uses the name as a variable that is not called. An attribute, as in `x.name`,
    and a name in quotes do not count.
    """
    return any(
        text[start - 1 : start] not in (".", '"', "'") and text[end : end + 2].lstrip()[:1] != "("
        for start, end in words(text, name)
    )


def _refers(value: ast.expr | None, name: str) -> bool:
    """Tell if an expression uses the name as a variable that is not called."""
    nodes = [] if value is None else [*ast.walk(value)]
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    return any(
        isinstance(node, ast.Name) and node.id == name and id(node) not in called for node in nodes
    )
