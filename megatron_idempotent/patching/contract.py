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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
UNCLEAR = "!"


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


def _parsed(line: str) -> tuple[str, Contract]:
    name, *words = line.split(" ")
    if words[:1] == [UNCLEAR]:
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


_BLOCKS = ("body", "orelse", "finalbody")

_Term = tuple[str, str]
"""Names what code is about: ("attribute", a name), ("text", a string), ("name", a variable)."""
_RETURN: _Term = "return", ""
_Step = tuple[str, tuple[ast.AST, ...]]
"""A kind and the code that belongs to it: ("if", (test,)), ("orelse", ()), ("", (statement,))."""


class BodyPart:
    """Finds the statements of a function's body that use an attribute, a variable or a string that
    occurs in one of the source `fragments`.

    Attributes count by name, on any object. Strings count, and so do return statements if a
    fragment has one. A name that the function binds counts where it is bound, any other name at
    every use.

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
        defaults = _defaults(self._body.tree.args)
        parameters = [
            ((f"parameter {name}", defaults[name]),)
            for name in self._parameters
            if name in defaults
        ]
        terms = {term for fragment in self._fragments for term in _terms_of(fragment)}
        return [*parameters, *self._touching(terms, self._body.tree.body, ())]

    def _touching(
        self, terms: set[_Term], statements: Sequence[ast.stmt], above: tuple[_Step, ...]
    ) -> Iterator[tuple[_Step, ...]]:
        """Yield each statement that uses one of `terms`, as a tuple: the conditions and loops
        around the statement, outermost first, then the statement.
        """
        for statement in statements:
            if isinstance(statement, SCOPES):
                step = (f"def {statement.name}", ())
                yield from self._touching(terms - {_RETURN}, statement.body, (*above, step))
                continue
            arms = list(_arms(statement))
            decides = _deciding(statement, has_arms=bool(arms))
            nodes = (node for root in decides[1] for node in nodes_of(root))
            if any(term in terms for node in nodes for term in _terms(node, self._body.bound)):
                yield (*above, decides)
            for arm, block in arms:
                yield from self._touching(terms, block, (*above, decides, arm))


def _arms(statement: ast.stmt) -> Iterator[tuple[_Step, Sequence[ast.stmt]]]:
    for name in _BLOCKS:
        if getattr(statement, name, None):
            yield (name, ()), getattr(statement, name)
    for handler in getattr(statement, "handlers", ()):
        yield ("except", _head(handler)), handler.body
    for case in getattr(statement, "cases", ()):
        yield ("case", _head(case)), case.body


def _head(node: ast.AST) -> tuple[ast.AST, ...]:
    """Return the nodes of a compound statement, or of one of its arms, that are in no block."""
    blocks = (ast.stmt, ast.ExceptHandler, ast.match_case)
    return tuple(child for child in ast.iter_child_nodes(node) if not isinstance(child, blocks))


def _deciding(statement: ast.stmt, *, has_arms: bool) -> _Step:
    if has_arms:
        return type(statement).__name__.lower(), _head(statement)
    # An assertion's message has no effect unless it fails.
    if isinstance(statement, ast.Assert):
        return "assert", (statement.test,)
    return "", (statement,)


def _defaults(arguments: ast.arguments) -> dict[str, tuple[ast.AST, ...]]:
    """Return, for each parameter of a function's signature, the syntax node of its default in a
    tuple; an empty tuple if it has no default.
    """
    positional = [*arguments.posonlyargs, *arguments.args]
    required = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*required, *arguments.defaults, *arguments.kw_defaults]
    both = zip([*positional, *arguments.kwonlyargs], defaults, strict=True)
    return {a.arg: () if default is None else (default,) for a, default in both}


def _terms_of(fragment: str) -> set[_Term]:
    """Return the terms of a source fragment, without the variables of its comprehensions."""
    nodes = list(ast.walk(ast.parse(fragment)))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    # `timers('a').start()` is about the timer called a, not about every `start`.
    methods = [
        call.func
        for call in calls
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call)
    ]
    terms = {term for node in nodes if node not in (*calls, *methods) for term in _terms(node)}
    targets = [node.target for node in nodes if isinstance(node, ast.comprehension)]
    return terms.difference(
        term for target in targets for node in ast.walk(target) for term in _terms(node)
    )


def _terms(node: ast.AST, bound: Collection[str] = ()) -> Sequence[_Term]:
    """Return the terms of one syntax node. The names in `bound` count only where they are bound."""
    match node:
        case ast.Attribute(attr=name):
            return [("attribute", name)]
        case ast.Constant(value=str(text)):
            return [("text", text)]
        case ast.Call(args=[_, ast.Constant(value=str(name)), *_]):  # setattr(a, 'b', c)
            return [("attribute", name)]
        case ast.Name(id=name, ctx=context):
            return [] if isinstance(context, ast.Load) and name in bound else [("name", name)]
        case ast.alias():
            return [("name", bound_by(node))]
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            return [("name", name) for name in names]
        case ast.Return():
            return [_RETURN]
    return []


def _readable(step: _Step) -> str:
    kind, nodes = step
    return f"{kind} {', '.join(map(ast.unparse, nodes))}".strip()
