"""The examples in docstrings, held against the code: syntax, calls, attributes, values of one line.

What an example names is looked up in its module, and else among the methods and attributes of the
class that it documents, then of the classes that its module knows. Those of several lines may name
what is the reader's own, too.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import functools
import importlib.util
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import megatron_idempotent
from megatron_idempotent import fp8, logprobs, step, window

NEEDS_ALL = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="the trainer's examples are among them, and its packages are not installed",
)
PACKAGE = Path(megatron_idempotent.__file__).parent
_EXAMPLE = re.compile(
    r"Example: (?:`(?P<code>[^`]+)`(?: is `?(?P<value>[^`]+?)`?\.(?=\s|$))?"
    r"(?:,? and(?: then)? `(?P<more>[^`]+)`)?)?"
)
#: What is no Python, by how it begins, and what it is.
OTHER = {"tensorboard --logdir": "a command"}
#: What is bound, and not evaluated, by how it begins, and why.
NOT_MADE = {
    "TextTokenizer.load(": "it would need a checkpoint",
    "VllmEngine(": "it would need a server",
    "WandbLogger(": "it would need an account",
}
FLAGS = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_BLOCK = re.compile(r"^( *)Example:\n((?:\1 +\S.*(?:\n|\Z)|\s*\n)+)", re.MULTILINE)
NEEDS_VLLM = "rl/engines/vllm_worker.py"
#: Names that examples of several lines take for the reader's own.
YOURS = {"forward_backward", "get_gpt_decoder_block_spec", "hf_weights", "loss_of", "model", "pack"}
YOURS |= {"get_forward_backward_func", "ray", "run", "send", "train"}
#: Names that examples take for something that is no class of this package.
TAKEN = {"loop": asyncio.AbstractEventLoop, "tensor": torch.Tensor, "module": torch.nn.Module}


#: The value of an example of several lines.
BLOCK = "block"


class Short(NamedTuple):
    """One example, and where it is."""

    file: str
    line: int
    code: str | None
    """None where no code follows in backticks."""
    value: str | None
    """Returns what the docstring says that it is."""
    owner: str | None
    """The class that it documents, or in whose method it is."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.code}"


def read(path: Path) -> Iterator[Short]:
    """The examples in a file's docstrings."""
    text, file = path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix()
    for constant, owner in _docstrings(ast.parse(text), None):
        shown = [
            (each, textwrap.dedent(each[2]), BLOCK) for each in _BLOCK.finditer(constant.value)
        ]
        for each in _EXAMPLE.finditer(constant.value):
            shown.append((each, each["code"], each["value"]))
            if each["more"] is not None:
                shown.append((each, each["more"], None))
        for each, code, value in shown:
            line = constant.lineno + constant.value[: each.start()].count("\n")
            yield Short(file, line, code, value, owner)


def _docstrings(node: ast.AST, owner: str | None) -> Iterator[tuple[ast.Constant, str | None]]:
    """Docstrings, those of attributes included, each with the class that it is in."""
    for child in ast.iter_child_nodes(node):
        inner = child.name if isinstance(child, ast.ClassDef) else owner
        yield from _docstrings(child, inner)
        match child:
            case ast.Expr(ast.Constant(str())):
                yield child.value, owner


def tree_of(code: str) -> ast.Module:
    """The example as Python: with something in an empty block, and `…` for what is left out."""
    code = re.sub(r"\s*\n\s*", " ", code).replace("…", "...")
    code = re.sub(r"(\(|, )\.\.\.\)", r"\1**left_out)", code)
    if code.endswith(":"):
        code += " ..."
    if code.startswith("@"):
        code += "\nclass Decorated: ..."
    tree = compile(code, "example", "exec", FLAGS)
    assert isinstance(tree, ast.Module)
    return tree


def resolved(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the object of a dotted name there; None where it is only the example's."""
    first, *rest = ast.unparse(node).split(".")
    try:
        return functools.reduce(getattr, rest, names[first])
    except (KeyError, AttributeError):
        return None


def binds(function: Any, call: ast.Call, *, before: int = 0) -> bool:
    """Hold a call against a signature, with so many arguments before its own; whether it has one.

    Raises:
        TypeError: the arguments do not fit.
    """
    if any(isinstance(each, ast.Starred) for each in call.args):
        return False
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a builtin
        return False
    keywords = {each.arg: None for each in call.keywords if each.arg is not None}
    whole = len(keywords) == len(call.keywords)
    bind = signature.bind if whole else signature.bind_partial
    bind(*[None] * before, *call.args, **keywords)
    return True


class Checked(NamedTuple):
    """Names what was held against what."""

    bound: int
    attributes: int
    made: int


def check(example: Short) -> Checked:
    """Compare an example with the code.

    Raises:
        Exception: what is wrong with it.
    """
    if example.code is None:
        raise ValueError("no code in backticks follows")
    if example.code.startswith(tuple(OTHER)):
        return Checked(0, 0, 0)
    if example.value is BLOCK:
        return Checked(*hold(example, compile(example.code, "example", "exec", FLAGS)), 0)
    tree = tree_of(example.code)
    return Checked(*hold(example, tree), _make(example, tree, seen_by(example.file, tree)))


def hold(example: Short, tree: ast.Module) -> tuple[int, int]:
    """Hold calls against signatures and attributes against classes; how many there were of each."""
    names = seen_by(example.file, tree)
    owner = names.get(example.owner or "")
    own: set[str] = set()
    if example.value is BLOCK:
        own |= YOURS
        for node in ast.walk(tree):
            match node:
                case ast.Import() | ast.ImportFrom():
                    exec(compile(ast.Module([node], []), "example", "exec"), names)
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    own.add(name)
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                    own.add(name)
        names = {name: each for name, each in names.items() if name not in own}
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    bound = attributes = 0
    for call in called.values():
        function = resolved(call.func, names)
        if function is None and isinstance(call.func, ast.Name):
            if call.func.id in own:
                continue
            function = getattr(owner, "__call__", None)  # noqa: B004 - its signature is looked at
            if not inspect.isfunction(function):
                raise NameError(f"{call.func.id} is not there")
            bound += binds(function, call, before=1)
        elif function is not None:
            bound += binds(function, call)
    kinds = [kind for kind in (owner, *names.values(), *TAKEN.values()) if inspect.isclass(kind)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or resolved(node, names) is not None:
            continue
        if isinstance(node.value, ast.Name) and node.value.id in YOURS:
            continue
        owners = [kind for kind in kinds if node.attr in _attributes(kind)]
        if owner in owners and not own:
            owners = [owner]
        if own:
            places = _written().get(node.attr, ())
            owners += [names_of(file)[name] for file, name in places if file != NEEDS_VLLM]
        if not owners:
            owners = [names_of(file)[name] for file, name in _written()[node.attr]]
        attributes += 1
        if id(node) in called and owners:
            methods = [getattr(kind, node.attr, None) for kind in owners]
            bound += _binds_one_of(methods, called[id(node)])
    return bound, attributes


def seen_by(file: str, tree: ast.Module) -> dict[str, Any]:
    """Names of a file's module, and others that an example in it uses: of this package, or whole
    modules."""
    names = {**vars(builtins), **names_of(file)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name) or node.id in names:
            continue
        if node.id in _defined():
            names[node.id] = names_of(_defined()[node.id])[node.id]
        elif node.id in {"torch"} | sys.stdlib_module_names:
            names[node.id] = importlib.import_module(node.id)
    return names


def _binds_one_of(functions: list[Any], call: ast.Call) -> bool:
    """Hold a method's call against those of that name."""
    errors = []
    for function in filter(callable, functions):
        try:
            return binds(function, call, before=not inspect.ismethod(function))
        except TypeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return False


def _make(example: Short, tree: ast.Module, names: dict[str, Any]) -> bool:
    """Evaluate an example all of whose names are there, and compare; False where it cannot be."""
    assert example.code is not None
    (statement, *more) = tree.body
    if more or not isinstance(statement, ast.Expr) or example.code.startswith(tuple(NOT_MADE)):
        return False
    parts = list(ast.walk(statement))
    looked_up = {id(node.func) for node in parts if isinstance(node, ast.Call)}
    looked_up |= {id(node.value) for node in parts if isinstance(node, ast.Attribute)}
    for node in parts:
        match node:
            case ast.Await() | ast.Constant(value=builtins.Ellipsis):
                return False
            case ast.Name(id=name, ctx=ast.Load()):
                # What is passed on under the name of a function is the example's own.
                own = inspect.isroutine(names.get(name)) and id(node) not in looked_up
                if own or name not in names:
                    return False
            case ast.Attribute(value=ast.Name()) if resolved(node, names) is None:
                return False
    value = eval(compile(ast.Expression(statement.value), "example", "eval"), dict(names))
    if isinstance(statement.value, ast.Compare):
        assert value, "is not so"
    if example.value is not None:
        assert value == ast.literal_eval(example.value), f"is {value!r}"
    return True


@functools.cache
def names_of(file: str) -> dict[str, Any]:
    """Return what a file's examples may name: its module's names, and all that is public."""
    package = megatron_idempotent
    rooms = (package, fp8, logprobs, step, window)
    place = re.sub(r"(/__init__)?\.py(:\w+)?$", "", file).replace("/", ".")
    module = importlib.import_module(f"{package.__name__}.{place}")
    public = {name: getattr(room, name) for room in rooms for name in room.__all__}
    return {package.__name__: package, **public, **vars(module)}


@functools.cache
def _attributes(kind: type) -> frozenset[str]:
    fields = (getattr(each, "__annotations__", {}) for each in kind.__mro__)
    return frozenset(dir(kind)).union(*fields)


class _Written(dict[str, list[tuple[str, str]]]):
    def __missing__(self, name: str) -> list[tuple[str, str]]:
        raise AttributeError(f"nothing has a {name}")


@functools.cache
def _written() -> _Written:
    """The classes of this package, as file and name, by what they define: fields, methods, and what
    `self` is given."""
    found = _Written()
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        for kind in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(kind, ast.ClassDef):
                continue
            for node in ast.walk(kind):
                match node:
                    case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                        pass
                    case ast.AnnAssign(target=ast.Name(id=name)):
                        pass
                    case ast.Attribute(attr=name, ctx=ast.Store()):
                        pass
                    case _:
                        continue
                found.setdefault(name, []).append((place, kind.name))
    return found


@functools.cache
def _defined() -> dict[str, str]:
    """The file of each public class and function of this package, by name."""
    return {
        node.name: path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    }
