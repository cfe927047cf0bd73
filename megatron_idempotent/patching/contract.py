"""Compares a function's body with what a wrapper assumes about the function.

`contracts.txt` has a contract for each wrapper: the parameters that the wrapper reads by name,
those that it takes by position, and the names that it unpacks the result into. `tools/contracts.py`
derives contracts from the wrappers' code. A reviewed body was read together with the wrapper; any
other body has to meet the contract.

`train()` changes with every release, but only a few of its statements matter to a wrapper. The
wrapper's fragments name the attributes, texts and names that it shares with the body. The body's
part consists of all statements that use one of these, in order, each below the conditions and loops
around it. From 0.12 to 0.20 `train()` had 116 different bodies; the part around `no_sync_func` had
three versions.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from .base import PACKAGE, Record, generated
from .source import (
    SCOPES,
    Body,
    bound_by,
    canonical,
    computed,
    digest,
    nodes_of,
    parse_body,
    watches,
)

CONTRACTS = "contracts.txt"
#: The word before the reason of `Contract.unclear`.
_UNCLEAR = "!"


class Contract(Record):
    """Holds what one wrapper assumes of the function that it wraps: parameters, result items.

    Example:
        contract_of(train).reads == ("config", "model")
    """

    reads: tuple[str, ...] = ()
    """Parameters whose values the wrapper reads from the bound arguments."""
    leading: tuple[str, ...] = ()
    """The wrapper's parameters after `original`, which it passes to the function by position."""
    keywords: tuple[str, ...] = ()
    """Parameters that the wrapper passes to the function by keyword."""
    items: tuple[str, ...] = ()
    """Names that the wrapper unpacks the result into, `_` for one that it ignores; may be empty."""
    takes_all: bool = False
    """True if the wrapper passes on any other arguments too, as `*args, **kwargs`."""
    or_more: bool = False
    """True if the result may have more items than the wrapper names."""
    yields: bool = False
    """True if the wrapper is a generator, so that the function has to be one."""
    unclear: str = ""
    """The reason why no contract could be derived, so that only reviewed bodies fit; else empty."""


def contract_of(wrapper: Callable[..., Any]) -> Contract:
    """Return the `Contract` that `contracts.txt` has for a wrapper. If the file lacks the wrapper,
    return one whose `unclear` says so.
    """
    name = name_of(wrapper)
    return contracts().get(name) or Contract(
        unclear=f"{CONTRACTS} lacks {name}; run `python tools/casebook.py`"
    )


def name_of(wrapper: Callable[..., Any]) -> str:
    """Return a wrapper's name in `contracts.txt`, such as `train_reentry:train`."""
    return f"{wrapper.__module__.removeprefix(f'{PACKAGE}.')}:{wrapper.__qualname__}"


@cache
def contracts() -> dict[str, Contract]:
    """Return all contracts in `contracts.txt` by the names of their wrappers (`name_of`)."""
    return dict(map(_parsed, generated(CONTRACTS)))


def line_of(name: str, contract: Contract) -> str:
    """Return the line of `contracts.txt` for a wrapper's name and its contract."""
    if contract.unclear:
        return f"{name} {_UNCLEAR} {contract.unclear}"
    lists = {field: value for field, value in vars(contract).items() if isinstance(value, tuple)}
    flags = [field for field, value in vars(contract).items() if value is True]
    return " ".join([name, *(f"{k}={','.join(v)}" for k, v in lists.items() if v), *flags])


def _parsed(line: str) -> tuple[str, Contract]:
    name, *words = line.split(" ")
    if words[:1] == [_UNCLEAR]:
        return name, Contract(unclear=" ".join(words[1:]))
    fields: dict[str, Any] = {}
    for field, _, value in (word.partition("=") for word in words):
        fields[field] = tuple(value.split(",")) if value else True
    return name, Contract(**fields)


def unmet(wrapper: Callable[..., Any], body: Body) -> str | None:
    """Compare a function's body with its wrapper's contract, i.e. what the wrapper assumes of it.
    Return the first mismatch as text that continues a sentence about the function, such as "returns
    no `loss`, which its wrapper takes from it"; None if the body fits.
    """
    contract = contract_of(wrapper)
    if contract.unclear:
        return f"cannot be compared with what its wrapper needs: {contract.unclear}"
    return next(_unmet(contract, body), None)


def _unmet(contract: Contract, body: Body) -> Iterator[str]:
    tree, own_nodes = body.tree, body.own_nodes
    if isinstance(tree, ast.AsyncFunctionDef):
        yield "is async, and its wrapper calls a plain function"
    if yields(own_nodes) and not contract.yields:
        yield "is a generator, and its wrapper calls a plain function"
    if contract.yields and not yields(own_nodes):
        yield "is no generator, and its wrapper yields what one does"
    for decorator in tree.decorator_list:
        if not watches(decorator):
            yield f"has the decorator `@{ast.unparse(decorator)}`, which nobody reviewed"
    arguments = tree.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    parameters = {*positional, *(a.arg for a in arguments.kwonlyargs)}
    for name in contract.reads:
        if name not in parameters:
            yield f"has no parameter `{name}`, which its wrapper reads"
    for name in contract.keywords:
        if name not in parameters and arguments.kwarg is None:
            yield f"has no parameter `{name}`, which its wrapper passes"
    for index, name in enumerate(contract.leading):
        if index >= len(positional) or positional[index] != name:
            yield f"does not take `{name}` as its parameter {index + 1}, as its wrapper passes it"
    if not contract.takes_all and (len(parameters) > len(contract.leading) or arguments.vararg):
        yield "has parameters that its wrapper does not know"
    if contract.items:
        yield from _unmet_items(contract.items, contract.or_more, _returning(body))


def called(node: ast.AST) -> str:
    """Return the name `f` if a node is a call `f(...)` of a plain name; an empty string for any
    other node.
    """
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _returning(body: Body) -> list[Body]:
    """Return `body`, then the body of each function `f` of the same module whose result it returns
    by `return f(...)`, and so on for `f` itself. Each function is listed once.
    """
    bodies = [body]
    for function in bodies:  # it grows while it is read
        for node in function.own_nodes:
            name = called(node.value) if isinstance(node, ast.Return) and node.value else ""
            returned = parse_body(body.module, name) if name else None
            if returned is not None and name not in [listed.tree.name for listed in bodies]:
                bodies.append(returned)
    return bodies


def _unmet_items(
    items: tuple[str, ...],
    or_more: bool,
    functions: list[Body],
) -> Iterator[str]:
    """Yield a text for each mismatch between a function's `return` statements and the names into
    which the wrapper unpacks the function's result.

    At least one `return` must have each name at its position, and none may have another name there.
    `None`, a call or another value at the position is accepted.
    """
    items_text = f"`{', '.join(items)}{', ...' if or_more else ''}`"
    function_names = {function.tree.name for function in functions}
    returned_names: set[str] = {"_"}
    for function in functions:
        if not _leaves(function.tree.body):
            yield f"does not end with a return of {items_text}, which its wrapper takes from it"
        for node in function.own_nodes:
            if not isinstance(node, ast.Return) or (
                node.value and called(node.value) in function_names
            ):
                continue
            elements = node.value.elts if isinstance(node.value, ast.Tuple) else []
            fits = len(elements) >= len(items) if or_more else len(elements) == len(items)
            names = [element.id if isinstance(element, ast.Name) else None for element in elements]
            returned_names.update(filter(None, names))
            both = zip(items, names, strict=False)
            if not fits or any(name not in (None, item) for item, name in both if item != "_"):
                statement = ast.unparse(node)
                yield f"has `{statement[:80]}`, where its wrapper takes {items_text} from it"
    for item in items:
        if item not in returned_names:
            yield f"returns no `{item}`, which its wrapper takes from it"


def _leaves(block: Sequence[ast.stmt]) -> bool:
    """Tell if a block of statements always ends in a return or a raise.
    If the last statement is an `if` or a `with`, its branches must do so.
    """
    last = block[-1]
    if isinstance(last, ast.If):
        return bool(last.orelse) and _leaves(last.body) and _leaves(last.orelse)
    if isinstance(last, ast.With):
        return _leaves(last.body)
    return isinstance(last, (ast.Return, ast.Raise))


def yields(nodes: Iterable[ast.AST]) -> bool:
    """Tell if a function with these syntax nodes has a `yield`, so that it is a generator."""
    return any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes)


_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
#: Fields of compound statements: those in the header, and the blocks.
_HEADS = ("test", "target", "iter", "items", "subject")
_BLOCKS = ("body", "orelse", "finalbody")

_Step = tuple[str, tuple[ast.AST, ...]]
"""A kind and the code that belongs to it: ("if", (test,)), ("orelse", ()), ("", (statement,))."""


class BodyPart:
    """Finds the statements of a function's body that use an attribute, a variable or a string that
    occurs in one of the source `fragments`.

    Args:
        body: the body of the function.
        fragments: source fragments, whose attributes, variables and strings are looked for.
        parameters: names of parameters whose defaults are found, too.
    """

    def __init__(self, body: Body, fragments: Iterable[str], parameters: Iterable[str]) -> None:
        self._body = body
        self._fragments = tuple(fragments)
        self._parameters = sorted(set(parameters))

    @computed
    def hash(self) -> str:
        """Hash of the found statements: twelve hex digits, the same on every Python version."""
        lines = (
            ">".join(f"{kind}({','.join(map(canonical, nodes))})" for kind, nodes in line)
            for line in self._lines
        )
        return digest("\n".join(lines))

    @property
    def text(self) -> str:
        """The found statements as text, one per line: the conditions and loops around the
        statement, then the statement.
        """
        return "\n".join(" > ".join(map(_readable, line)) for line in self._lines)

    @computed
    def _lines(self) -> list[tuple[_Step, ...]]:
        tree = self._body.tree
        terms = _Terms(self._fragments, self._body.bound)
        declared = _declarations(tree.args)
        parameters = [
            ((f"parameter {name}", declared[name]),)
            for name in self._parameters
            if name in declared
        ]
        return [*parameters, *_touching(terms, tree.body, (), of_function=True)]


def _touching(
    terms: _Terms, statements: Sequence[ast.stmt], above: tuple[_Step, ...], *, of_function: bool
) -> Iterator[tuple[_Step, ...]]:
    """Yield each statement that uses one of `terms`, as a tuple: the conditions and loops around
    the statement, outermost first, then the statement.

    `of_function` is True for statements of the function itself, False for those of an inner one.
    """
    for statement in statements:
        if isinstance(statement, SCOPES):
            step = (f"def {statement.name}", ())
            yield from _touching(terms, statement.body, (*above, step), of_function=False)
            continue
        arms = list(_arms(statement))
        decides = _head(statement) if arms else _plain(statement)
        if terms.touched_by(decides[1], of_function=of_function):
            yield (*above, decides)
        for arm, block in arms:
            yield from _touching(terms, block, (*above, decides, arm), of_function=of_function)


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
    # An assertion's message has no effect unless it fails.
    if isinstance(statement, ast.Assert):
        return "assert", (statement.test,)
    return "", (statement,)


def _declarations(arguments: ast.arguments) -> dict[str, tuple[ast.AST, ...]]:
    """Return, for each parameter of a function's signature, the syntax node of its default in a
    tuple; an empty tuple if it has no default.
    """
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    both = [
        *zip(positional, defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {a.arg: () if default is None else (default,) for a, default in both}


class _Terms:
    """Collects the attributes, string constants and variables that occur in source fragments. Its
    method `touched_by` tells if other code uses any of them.

    Attributes count by name, on any object. Strings count, and so do return statements if a
    fragment has one. A name that the function binds counts where it is bound, any other name at
    every use.
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
        # `timers('a').start()` is about the timer called a, not about every `start`.
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

    def touched_by(self, code: Sequence[ast.AST], *, of_function: bool) -> bool:
        if self._returns and of_function and any(isinstance(node, ast.Return) for node in code):
            return True
        return any(self._is_one(node) for root in code for node in nodes_of(root))

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
            return bound_by(node) in self._names
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            return not self._names.isdisjoint(node.names)
        return False


def _readable(step: _Step) -> str:
    kind, nodes = step
    return f"{kind} {', '.join(map(ast.unparse, nodes))}".strip()
