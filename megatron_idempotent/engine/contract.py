"""Read off a wrapper what it takes for granted about the function that it goes around.

Nobody has to write it down twice: the parameters that the wrapper asks for by name, those that it
takes by position, and the items of the result that it unpacks, by the names that it gives them. A
body that a person reviewed was read together with the wrapper; any other one has to fit.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from .frozen import Record
from .source import Body, watches

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Contract(Record):
    """The needs of one wrapper.

    Example:
        contract_of(train).reads == ("config", "model")
    """

    reads: tuple[str, ...]
    """Parameters that it looks up among the bound arguments."""
    leading: tuple[str, ...]
    """Its own parameters after `original`, which it passes on by position."""
    takes_all: bool
    """True where it passes on any other arguments too, as `*args, **kwargs`."""
    items: tuple[str, ...] | None
    """Names that it unpacks the result into, `_` for any; None where it leaves that whole."""
    or_more: bool
    """True where the result may have more items than these."""


def unmet(wrapper: Callable[..., Any], body: Body) -> str | None:
    """Say what the wrapper needs and the body does not give, as a sentence's end; else None."""
    try:
        contract = contract_of(wrapper)
    except (OSError, TypeError, ValueError) as error:
        return f"cannot be compared with what its wrapper needs: {error}"
    return next(_unmet(contract, body.tree), None)


@lru_cache(maxsize=256)
def contract_of(wrapper: Callable[..., Any]) -> Contract:
    """The wrapper's contract.

    Raises:
        OSError, TypeError: its source cannot be had.
        ValueError: it handles arguments or result in a way that cannot be followed.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(wrapper))).body
    if not isinstance(tree, ast.FunctionDef):
        raise ValueError(f"{wrapper.__qualname__} is no plain function")
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    items, or_more = _items(tree, parents)
    arguments = tree.args
    return Contract(
        reads=tuple(sorted(set(_reads(tree, parents)))),
        leading=tuple(argument.arg for argument in arguments.args[1:]),
        takes_all=arguments.vararg is not None and arguments.kwarg is not None,
        items=items,
        or_more=or_more,
    )


def _reads(tree: ast.FunctionDef, parents: dict[ast.AST, ast.AST]) -> Iterator[str]:
    for node in ast.walk(tree):
        if _called(node) != "arguments":
            continue
        above = parents[node]
        if isinstance(above, ast.Assign) and isinstance(above.targets[0], ast.Name):
            name = above.targets[0].id
            uses = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name]
            found = [parents[use] for use in uses if isinstance(use.ctx, ast.Load)]
        else:
            found = [above]
        for use in found:
            key = use.slice if isinstance(use, ast.Subscript) else None
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                raise ValueError(f"{tree.name} reads arguments otherwise than by a constant name")
            yield key.value


def _items(
    tree: ast.FunctionDef, parents: dict[ast.AST, ast.AST]
) -> tuple[tuple[str, ...] | None, bool]:
    results = set()
    for node in ast.walk(tree):
        above = parents.get(node)
        if isinstance(node, ast.Call) and _calls_original(node) and isinstance(above, ast.Assign):
            results.add(above.targets[0])
    names = {result.id for result in results if isinstance(result, ast.Name)}
    unpacked = [result for result in results if isinstance(result, ast.Tuple)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load):
            above = parents[node]
            if isinstance(above, ast.Assign) and isinstance(above.targets[0], ast.Tuple):
                unpacked.append(above.targets[0])
            elif isinstance(above, ast.Subscript):
                raise ValueError(f"{tree.name} takes an item of the result otherwise than by name")
    if not unpacked:
        return None, False
    (target,) = unpacked
    or_more = isinstance(target.elts[-1], ast.Starred)
    elements = target.elts[:-1] if or_more else target.elts
    return tuple(map(_last_name, elements)), or_more


def _calls_original(node: ast.Call) -> bool:
    if _called(node) == "arguments":
        return False
    callees = [node.func, *node.args]
    return any(isinstance(callee, ast.Name) and callee.id == "original" for callee in callees)


def _called(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _last_name(target: ast.expr) -> str:
    if isinstance(target, ast.Attribute):
        return target.attr
    if isinstance(target, ast.Name):
        return target.id
    raise ValueError(f"the result is unpacked into {ast.unparse(target)}, which has no name")


def _unmet(contract: Contract, tree: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    if isinstance(tree, ast.AsyncFunctionDef):
        yield "is async, and its wrapper calls a plain function"
    own = list(_own_nodes(tree))
    if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in own):
        yield "is a generator, and its wrapper calls a plain function"
    for decorator in tree.decorator_list:
        if not watches(decorator):
            yield f"has the decorator `@{ast.unparse(decorator)}`, which nobody reviewed"
    arguments = tree.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    named = {*positional, *(a.arg for a in arguments.kwonlyargs)}
    for name in contract.reads:
        if name not in named:
            yield f"has no parameter `{name}`, which its wrapper reads"
    for index, name in enumerate(contract.leading):
        if index >= len(positional) or positional[index] != name:
            yield f"does not take `{name}` as its parameter {index + 1}, as its wrapper passes it"
    if not contract.takes_all and (len(named) > len(contract.leading) or arguments.vararg):
        yield "has parameters that its wrapper does not know"
    if contract.items is not None:
        yield from _unmet_items(contract.items, contract.or_more, tree, own)


def _unmet_items(
    items: tuple[str, ...],
    or_more: bool,
    tree: ast.FunctionDef | ast.AsyncFunctionDef,
    own: list[ast.AST],
) -> Iterator[str]:
    wanted = f"`{', '.join(items)}{', ...' if or_more else ''}`"
    if not isinstance(tree.body[-1], ast.Return):
        yield f"does not end with a return of {wanted}, which its wrapper takes from it"
    for node in own:
        if not isinstance(node, ast.Return):
            continue
        given = node.value.elts if isinstance(node.value, ast.Tuple) else []
        fits = len(given) >= len(items) if or_more else len(given) == len(items)
        names = [each.id if isinstance(each, ast.Name) else None for each in given]
        if not fits or any(w not in ("_", n) for w, n in zip(items, names, strict=False)):
            said = ast.unparse(node)
            yield f"has `{said[:80]}`, where its wrapper takes {wanted} from it"


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of the function, without those of functions and classes in it."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            yield child
            yield from _own_nodes(child)
