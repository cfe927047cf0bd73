"""Compares the function that runs with the source that was read.

A name may lead to a lambda, to another definition of the module, or to code that was compiled
before its file changed. So the function's code is compared with the code in the file's .pyc; if
there is none, the source is compiled again.
"""

from __future__ import annotations
import __future__

import ast
import importlib.util
import marshal
import os
import re
import struct
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType

from .source import Body

_32_BITS = 0xFFFFFFFF
_FEATURES = 0
for _name in __future__.all_feature_names:
    _FEATURES |= getattr(__future__, _name).compiler_flag
_COMPARED = (
    *("co_name", "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount"),
)


@lru_cache(maxsize=256)  # apply() asks before it changes anything, and again for each function
def difference(code: CodeType, body: Body, qualname: str) -> str | None:
    """Say what the code is, as the end of a sentence, if it is not the body's; else None."""
    where = f"{code.co_filename}:{code.co_firstlineno}"
    if code.co_name != body.tree.name:
        return f"{code.co_name} from {where}"
    if code.co_firstlineno != body.line:
        return f"the one at {where}, and the source that was read begins at line {body.line}"
    if not any(_same(code, compiled) for compiled in _compiled(body, qualname, code)):
        return f"not what {where} says: it was compiled from other source"
    return None


def _compiled(body: Body, qualname: str, like: CodeType) -> Iterator[CodeType]:
    """Yields the body's code: from the .pyc, compiled by itself, and compiled in its file."""
    found = _inside(kept(like.co_filename), qualname)
    if found is not None:
        yield found
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
    module = ast.Module(body=[*_imports(body.module), definition], type_ignores=[])
    for source in (module, body.module):
        flags = like.co_flags & _FEATURES
        module_code = compile(source, like.co_filename, "exec", flags, dont_inherit=True)
        found = _inside(module_code, qualname)
        if found is not None:
            yield found


def _inside(found: CodeType | None, qualname: str) -> CodeType | None:
    for name in qualname.split("."):
        # The last definition of a name counts, as it does at run time.
        inner = () if found is None else found.co_consts
        codes = [each for each in inner if isinstance(each, CodeType)]
        found = next((each for each in reversed(codes) if each.co_name == name), None)
    return found


def kept(file: str) -> CodeType | None:
    """Return the module's code from its .pyc file; None if that does not fit the source."""
    try:
        cached = importlib.util.cache_from_source(file)
        source, made = os.stat(file), os.stat(cached)
    except (OSError, NotImplementedError):
        return None
    # The file itself notes whole seconds, within which the source may have changed.
    if made.st_mtime_ns < source.st_mtime_ns:
        return None
    return _read_kept(cached, int(source.st_mtime), source.st_size)


@lru_cache(maxsize=64)
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


@lru_cache(maxsize=64)
def _imports(text: str) -> tuple[ast.stmt, ...]:
    """Return a module's imports outside of functions and classes, without parsing all of it."""
    found: list[ast.stmt] = []
    outside = True
    for match in re.finditer(r"^(?:([\w@]+)|[ \t]+(?=import\b|from\b))", text, re.MULTILINE):
        if match[1] is not None:
            outside = match[1] not in ("def", "class", "async") and match[1][0] != "@"
        if outside:
            rest = text[match.start() : match.start() + 5000]
            statement = re.match(r"[ \t]*(?:import|from)\b[^\n(]*(?:\([^)]*\))?", rest)
            try:
                found += ast.parse(textwrap.dedent(statement[0])).body if statement else []
            except SyntaxError:
                continue  # a text that looks like one; where it matters, the whole file decides
    # Features come with the flags, and nothing may stand before their import.
    return tuple(each for each in found if getattr(each, "module", "") != "__future__")


def _same(one: CodeType, other: CodeType) -> bool:
    if any(getattr(one, name) != getattr(other, name) for name in _COMPARED):
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    return all(
        _same(mine, theirs)
        if isinstance(mine, CodeType) and isinstance(theirs, CodeType)
        else type(mine) is type(theirs) and (mine == theirs or repr(mine) == repr(theirs))
        for mine, theirs in zip(one.co_consts, other.co_consts, strict=True)
    )
