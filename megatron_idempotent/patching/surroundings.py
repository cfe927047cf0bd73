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
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .base import Record, generated
from .moved import bases_of
from .source import canonical, definitions, digest, parse_body

if TYPE_CHECKING:
    from .record import Patch, Target
    from .releases import Installed, Sources

READS = "reads.txt"
_PRE = "rc"
_KEEPS = "keeps"


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
        texts = (sources.text(module) for module in self.modules)
        if not self.use:
            return any(text is not None and binds(text, self.owner, self.name) for text in texts)
        return self.is_allowed(sources) is not False

    def is_allowed(self, sources: Sources) -> bool | None:
        """Tell if all definitions of the name in the sources allow the wrapper's use of it.
        Return None if the sources do not define the name.
        """
        texts = (sources.text(module) for module in self.modules)
        answers = [fits(text, self.owner, self.name, self.use) for text in texts if text]
        decided = [answer for answer in answers if answer is not None]
        return all(decided) if decided else None

    def __str__(self) -> str:
        modules_text = " or ".join(self.modules)
        if not self.name:
            return f"{modules_text} is not there, and its wrapper imports it"
        place_text = f"{modules_text}:{self.owner}" if self.owner else modules_text
        if self.use == "!":
            return f"{place_text} lets nobody set `{self.name}`, which its wrapper does"
        if self.use.startswith("("):
            return f"{place_text}.{self.name} takes no `{self.use[1:-1]}`, which its wrapper passes"
        if self.use:
            return f"{place_text}.{self.name} returns something else, which its wrapper takes apart"
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
    plain = bound.removesuffix(_PRE)
    return tuple(map(int, plain.split("."))), plain == bound


def bound_of(key: tuple[tuple[int, ...], bool]) -> str:
    """Return a version key (`key_of`) as text, in the form of `Need.since`."""
    return ".".join(map(str, key[0])) + ("" if key[1] else _PRE)


_table: dict[str, Needs] = {}


def table() -> dict[str, Needs]:
    """Return the contents of `reads.txt`: by patch id, the names of upstream that the patch's
    wrappers use.
    """
    if not _table:
        _table.update(parsed(generated(READS)))
    return _table


def parsed(lines: list[str]) -> dict[str, Needs]:
    """Parse lines of `reads.txt`. Return, by patch id, the names of upstream that the patch's
    wrappers use.
    """
    needs_of: dict[str, list[Need]] = {}
    keeps = set()
    patch_id = ""
    for line in lines:
        if not line.startswith(" "):
            patch_id, _, flag = line.partition(" ")
            needs_of[patch_id] = []
            keeps |= {patch_id} if flag == _KEEPS else set()
            continue
        place_text, *names = line.split()
        modules, _, owner = place_text.partition(":")
        for entry in names or [""]:
            name, use, since, before, excused = re.fullmatch(
                r"(\.?\w*)(!|\([\w,]+\)|\[[\w|]+\])?(?:>=([\w.]+))?(?:<([\w.]+))?(\??)", entry
            ).groups("")  # type: ignore[union-attr]
            needs_of[patch_id].append(
                Need(
                    modules=tuple(modules.split("|")),
                    owner=owner,
                    name=name,
                    since=since,
                    before=before,
                    use=use,
                    excused=bool(excused),
                )
            )
    return {
        name: Needs(names=tuple(needs), keeps=name in keeps) for name, needs in needs_of.items()
    }


def lines_of(needs: Mapping[str, Needs]) -> Iterator[str]:
    """Yield the lines of `reads.txt` for these needs, in the format that `parsed` reads."""
    for patch_id in sorted(needs):
        yield f"{patch_id} {_KEEPS}" if needs[patch_id].keeps else patch_id
        by_place: dict[str, list[str]] = {}
        for need in needs[patch_id].names:
            place_text = "|".join(need.modules) + (f":{need.owner}" if need.owner else "")
            since = f">={need.since}" if need.since else ""
            before_text = f"<{need.before}" if need.before else ""
            excused = "?" if need.excused else ""
            by_place.setdefault(place_text, []).append(
                f"{need.name}{need.use}{since}{before_text}{excused}"
            )
        for place_text in sorted(by_place):
            yield " ".join([" ", place_text, *sorted(filter(None, by_place[place_text]))])[1:]


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
    if needs.keeps:
        for module, owner in sorted(_classes(patch, needs)):
            text = sources.text(module)
            if text is not None and has_slots(text, owner):
                return (
                    f"{module}:{owner} has __slots__, so that its wrappers can keep nothing on it"
                )
            is_own = owner in {t.qualname.rpartition(".")[0] for t in patch.targets}
            if text is not None and is_own and is_frozen(text, owner):
                return f"{module}:{owner} is frozen, so that its wrappers can keep nothing on it"
    return next(
        (detour for target in patch.targets for detour in _round(target, patch, sources)), None
    )


def _borders(patch: Patch, needs: Iterable[Need]) -> list[tuple[tuple[int, ...], bool]]:
    """Return the keys (`key_of`) of the versions to check, newest first: the first version in the
    patch's range, and within the range each version from which on one of `needs` begins or ceases
    to apply.
    """
    first, end = _key(patch.since or "0"), _key(patch.before)
    bounds = {_key(bound) for need in needs for bound in (need.since, need.before) if bound}
    return [*sorted((key for key in bounds if first < key < end), reverse=True), first]


def _classes(patch: Patch, needs: Needs) -> set[tuple[str, str]]:
    named_classes = {(need.modules[0], need.owner) for need in needs.names if need.owner}
    owners = {(target.module, target.qualname.rpartition(".")[0]) for target in patch.targets}
    return named_classes | {owner_class for owner_class in owners if owner_class[1]}


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
        if not any(_is_part(letter) for letter in neighbours):
            yield start, end
        start = text.find(name, end)


def _is_part(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


_ASSIGNS = re.compile(r"(?P<left>[^=\n#]*?)\s*[|+]?=(?!=)")
_LEFT = re.compile(r"[\w.\s,()\[\]'\"*]*(?::[^=\n]*)?")
#: The end of a tuple, on several lines, that is the target of an assignment.
_IN_A_TUPLE = re.compile(r",[\w\s.,]*\)\s*=(?!=)")
#: The beginnings of statements whose blocks have the scope of the module or class.
_OPEN = ("class ", "from ", "if ", "elif ", "else", "try", "except", "finally", "with ")


def _binds(text: str, start: int, end: int, *, of_any: bool) -> bool:
    begin, stop = text.rfind("\n", 0, start) + 1, text.find("\n", end)
    text_before, text_after = text[begin:start], text[end : stop if stop >= 0 else len(text)]
    head = text_before.strip()
    if head in ("def", "class", "async def"):
        return not of_any
    if head == "global" or re.search(r"\bsetattr\([^,\n]+,\s*[\"']$", text_before):
        return True
    if text_before.endswith("."):
        # `self.name: int = 1`, `a.name, b.name = 1, 2`
        if not of_any and not text_before.endswith("self."):
            return False
        return _is_assigned(text_before, text_after) or bool(_IN_A_TUPLE.match(text, end))
    if of_any or not _is_outside(text, begin, text_before):
        return False
    if re.match(r"(?:from|import)\b", head):
        return True
    opened = max(text.rfind("import (", 0, start), text.rfind("import(", 0, start))
    if opened > text.rfind(")", 0, start):
        return True
    return bool(not head and re.match(r"\s*:\s*\S", text_after)) or _is_assigned(
        text_before, text_after
    )


def _is_assigned(text_before: str, text_after: str) -> bool:
    assignment = _ASSIGNS.match(text_after)
    if not (assignment and _LEFT.fullmatch(assignment["left"]) and _LEFT.fullmatch(text_before)):
        return False
    left_side = (
        text_before + assignment["left"]
    )  # else the equals sign is a keyword's, or a default's
    if "," in left_side and not assignment[0].endswith(
        " ="
    ):  # of a call that began on a line before
        return False
    return left_side.count("(") == left_side.count(")")


def _is_outside(text: str, begin: int, text_before: str) -> bool:
    """Tell if a line of a source text is in a module's or class's scope, not in a function."""
    depth = len(text_before) - len(text_before.lstrip())
    if not depth:
        return True
    heads = _heads(text)
    head_start = heads[max(0, bisect_right(heads, begin) - 1)] if heads else 0
    line = text[head_start : head_start + 10]
    return line.startswith(_OPEN) and (depth == 4 or not line.startswith("class "))


@lru_cache(maxsize=64)
def _heads(text: str) -> list[int]:
    """Return the offsets of the lines that begin with a name or a decorator, unindented."""
    return [match.start() for match in re.finditer(r"^[A-Za-z_@]", text, re.MULTILINE)]


@lru_cache(maxsize=256)
def class_text(text: str, owner: str) -> str:
    """Return the source of all classes named `owner` in a module's text, decorators included."""
    parts = []
    for line in definitions(text).get(owner, ()):
        if line.is_class:
            heads = _heads(text)
            next_head = bisect_right(heads, line.end)
            end = heads[next_head] if next_head < len(heads) else len(text)
            parts.append(text[_above(text, line.start) : end])
    return "\n".join(parts)


def _above(text: str, start: int) -> int:
    """Return the offset of a definition's first decorator line; `start` if there is none."""
    line_start = text.rfind("\n", 0, max(0, start - 1)) + 1
    while start and text.startswith("@", line_start):
        start, line_start = line_start, text.rfind("\n", 0, max(0, line_start - 1)) + 1
    return start


@lru_cache(maxsize=1024)
def has_slots(text: str, owner: str) -> bool:
    """Tell if a class and all its base classes have `__slots__`, so that the class's objects lack a
    `__dict__`.
    """
    class_lines = class_text(text, owner)
    if "slots" not in class_lines:
        return False
    declaration = re.search(
        r"^\s+__slots__\b.*?=\s*([^\n]*(?:\n(?!\s+\w+ *[=:(]|\s+def ).*)*)", class_lines, re.M
    )
    decorator = re.search(r"^@.*\bslots\s*=\s*True", class_lines, re.MULTILINE)
    if (declaration is None and decorator is None) or (
        declaration is not None and "__dict__" in declaration[1]
    ):
        return False
    # A base class without slots gives the class's objects a __dict__.
    bases = (base.rpartition(".")[2] for base in bases_of(text, owner))
    return all(
        base in ("object", "ABC", "Generic", "Protocol") or has_slots(text, base) for base in bases
    )


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
    if use == "!":
        return _may_be_set(text, owner, name)
    if use.startswith("("):
        parameter_names = parameters(text, owner, name)
        return (
            None
            if parameter_names is None
            else parameter_names >= set(use[1:-1].split(",")) or "**" in parameter_names
        )
    result_hash = returned(text, owner, name)
    return None if result_hash is None else result_hash in use[1:-1].split("|")


@lru_cache(maxsize=1024)
def _may_be_set(text: str, owner: str, name: str) -> bool | None:
    class_lines = class_text(text, owner)
    if not any(words(class_lines, name)):
        return None
    if is_frozen(text, owner):
        return False
    if has_slots(text, owner) and not re.search(rf"__slots__[^)\]]*[\"']{name}[\"']", class_lines):
        # With slots=True a dataclass makes the slots from its fields.
        return "slots=True" in class_lines and bool(
            re.search(rf"^\s+{name}\s*:", class_lines, re.MULTILINE)
        )
    if not any(_is_defined(class_lines, *span) for span in words(class_lines, name)):
        return True  # so the class is not searched with a regex
    return name not in _read_only(class_lines)


def _is_defined(text: str, start: int, end: int) -> bool:
    """Tell if the line with a name may define a property or method of that name."""
    return text.startswith("def ", start - 4) or "property(" in text[end : text.find("\n", end)]


#: A property from its decorator to its name, a setter, or a property that a call makes.
_PROPERTY = re.compile(
    r"^[ \t]*@(?:\w+\.)*(?:abstract)?property\s*\n(?:[ \t]*[@#].*\n)*[ \t]*def (\w+)"
    r"|^[ \t]*@(\w+)\.setter\b"
    r"|^[ \t]+(\w+)\s*(?::[^=\n]*)?=\s*property\([^,\n]*\)",
    re.MULTILINE,
)


@lru_cache(maxsize=256)
def _read_only(class_lines: str) -> frozenset[str]:
    """Return the properties of a class that have no setter."""
    if "property" not in class_lines:
        return frozenset()
    properties = _PROPERTY.findall(class_lines)
    read, written, deleted = ({names[kind] for names in properties} for kind in range(3))
    return frozenset(((read - written) | deleted) - {""})


@lru_cache(maxsize=1024)
def is_frozen(text: str, owner: str) -> bool:
    """Tell if no attribute of a class's objects can be set: a frozen dataclass, a NamedTuple."""
    class_lines = class_text(text, owner)
    if "frozen" not in class_lines and "NamedTuple" not in class_lines:
        return False
    decorators = class_lines[: class_lines.find(f"class {owner}")]
    frozen = re.search(r"^[ \t]*@[\w.]*dataclass\([^\n]*\bfrozen\s*=\s*True", decorators, re.M)
    return bool(frozen) or "NamedTuple" in bases_of(text, owner)


@lru_cache(maxsize=1024)
def parameters(text: str, owner: str, name: str) -> frozenset[str] | None:
    """Return the parameters of a function or of a class's constructor.

    `**` among them stands for any other keyword. None means that the module does not define it.
    """
    body = parse_body(text, f"{owner}.{name}" if owner else name)
    if body is None and not owner and (class_lines := class_text(text, name)):
        body = parse_body(text, f"{name}.__init__")
        if body is None:
            # Fields of a dataclass; a base class may have others.
            fields = re.findall(r"^(?:[ ]{4}|\t)(\w+)[ ]*:", class_lines, re.MULTILINE)
            return frozenset([*fields, *(["**"] if bases_of(text, name) else [])])
    if body is None:
        return None
    arguments = body.tree.args
    all_arguments = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return frozenset([*(a.arg for a in all_arguments), *(["**"] if arguments.kwarg else [])])


@lru_cache(maxsize=256)
def returned(text: str, owner: str, name: str) -> str | None:
    """Return a hash of the statements of a function that make its result. Return None if the module
    or class does not define the function.
    """
    body = parse_body(text, f"{owner}.{name}" if owner else name)
    if body is None:
        return None
    from .contract import BodyPart

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


def _round(target: Target, patch: Patch, sources: Sources) -> Iterator[str]:
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
        for heir in _heirs(sources.text(module) or "", owner, name):
            if f"{module}:{heir}.{name}" not in our_addresses:
                yield f"{module}:{heir} overrides {target.qualname}, and does not call it"


@lru_cache(maxsize=1024)
def _heirs(text: str, owner: str, name: str) -> tuple[str, ...]:
    """Return the direct subclasses of `owner` in a module that override the method `name`.
    Subclasses whose method calls the overridden one are left out.
    """
    return tuple(
        heir
        for heir, bases in _classes_below(text)
        if owner in bases and any(words(bases, owner)) and _overrides(class_text(text, heir), name)
    )


@lru_cache(maxsize=128)
def _classes_below(text: str) -> tuple[tuple[str, str], ...]:
    """Return (class name, text of its base classes) for each class of a module that has base
    classes.
    """
    # An indented one may be an example in a docstring.
    return tuple(re.findall(r"^class (\w+)\(([^)]*)\)", text, re.MULTILINE))


def _overrides(class_lines: str, name: str) -> bool:
    if not any(words(class_lines, name)):
        return False
    method = re.search(
        rf"^([ ]{{4}}|\t)(?:async )?def {name}\b.*?(?=^\1(?:def|async|@|\w)|\Z)",
        class_lines,
        re.M | re.S,
    )
    assigned = re.search(
        rf"^(?:[ ]{{4}}|\t){name}\s*(?::[^=\n]*)?=(?!=)", class_lines, re.MULTILINE
    )
    return bool(assigned or (method and not re.search(rf"\.{name}\s*\(", method[0])))


_DEFINES = re.compile(r"@|(?:def|class|async|import|from)\b")


@lru_cache(maxsize=1024)
def _held(text: str, owner: str, name: str) -> tuple[str, ...]:
    """Return the source of each assignment that refers to a function without calling it, so that it
    keeps the unpatched function. Only the function's module, or its class, is searched.
    """
    scope_lines = class_text(text, owner) if owner else text
    if not any(_mentions(part, name) for part in _open_statements(scope_lines, bool(owner))):
        return ()
    return _held_by_statements(text, owner, name)


def _mentions(text: str, name: str) -> bool:
    """Tell if a text uses the name as a variable that is not called. An attribute, as in `x.name`,
    and a name in quotes do not count.
    """
    return any(
        text[start - 1 : start] not in (".", '"', "'") and text[end : end + 2].lstrip()[:1] != "("
        for start, end in words(text, name)
    )


@lru_cache(maxsize=64)
def _open_statements(scope_lines: str, is_class: bool) -> tuple[str, ...]:
    """Return the statements of a module or class other than definitions and imports.

    The text is cut at lines with the least indentation. Such lines of a docstring are returned,
    too, although they are no statements.
    """
    # A comment, bracket or quote with the least indentation belongs to the statement above it.
    indentation = r"(?:[ ]{1,4}|\t)" if is_class else ""
    heads = [
        head.end()
        for head in re.finditer(rf"^{indentation}(?=[\w@(\[*])", scope_lines, re.MULTILINE)
    ]
    if not heads:  # a class in a style that is not upstream's
        return (scope_lines,)
    parts = [scope_lines[start:end] for start, end in pairwise([0, *heads, len(scope_lines)])]
    return tuple(part for part in parts if not _DEFINES.match(part))


def _held_by_statements(text: str, owner: str, name: str) -> tuple[str, ...]:
    try:
        block: list[ast.stmt] = ast.parse(text).body
    except SyntaxError:
        return ()
    if owner:
        classes = [n for n in block if isinstance(n, ast.ClassDef) and n.name == owner]
        block = [statement for owner_class in classes for statement in owner_class.body]
    clauses = []
    for statement in block:
        value = getattr(statement, "value", None)
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or value is None:
            continue
        called = {id(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)}
        if any(
            isinstance(node, ast.Name) and node.id == name and id(node) not in called
            for node in ast.walk(value)
        ):
            clauses.append(ast.unparse(statement).splitlines()[0][:80])
    return tuple(clauses)


def forget() -> None:
    """Clear this module's caches of results for source texts."""
    for cached in (
        *(binds, _heads, class_text, has_slots, _heirs, _classes_below, _held, _open_statements),
        *(_may_be_set, _read_only, is_frozen, parameters, returned),
    ):
        cached.cache_clear()
