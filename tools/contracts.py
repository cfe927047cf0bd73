"""Derives from a wrapper's code its contract: the assumptions about the wrapped function.

`python tools/casebook.py` writes contracts into `contracts.txt`, so `apply()` parses no wrapper.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import _checkout  # noqa: F401  # before what it finds

from megatron_idempotent.patching.contract import UNCLEAR, Contract, called, name_of, yields
from megatron_idempotent.patching.record import Patch
from megatron_idempotent.patching.source import own_nodes


def contract_lines(patches: Iterable[Patch]) -> list[str]:
    """Return the lines of `contracts.txt`: each wrapper's assumptions about its function."""
    wrappers = {name_of(target.wrapper): target.wrapper for p in patches for target in p.targets}
    return [line_of(name, derived(wrapper)) for name, wrapper in sorted(wrappers.items())]


def line_of(name: str, contract: Contract) -> str:
    """Return the line of `contracts.txt` for a wrapper's name and its contract."""
    if contract.unclear:
        return f"{name} {UNCLEAR} {contract.unclear}"
    lists = {field: value for field, value in vars(contract).items() if isinstance(value, tuple)}
    flags = [field for field, value in vars(contract).items() if value is True]
    return " ".join([name, *(f"{k}={','.join(v)}" for k, v in lists.items() if v), *flags])


def derived(wrapper: Callable[..., Any]) -> Contract:
    """Return as a `Contract` what a wrapper's code assumes of the function that it wraps.
    If that is unclear, the contract has only the reason, in `unclear`.
    """
    try:
        return _derived(wrapper)
    except ValueError as error:
        return Contract(unclear=str(error))


def _derived(wrapper: Callable[..., Any]) -> Contract:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(wrapper))).body
    if not isinstance(tree, ast.FunctionDef):
        raise ValueError(f"{wrapper.__qualname__} is no plain function")
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    items, or_more = _items(tree, parents)
    arguments = tree.args
    return Contract(
        reads=tuple(sorted(set(_reads(tree, parents)))),
        leading=tuple(argument.arg for argument in arguments.args[1:]),
        keywords=tuple(sorted(set(_keywords(tree)))),
        takes_all=arguments.vararg is not None and arguments.kwarg is not None,
        items=items,
        or_more=or_more,
        yields=yields(own_nodes(tree)),
    )


def _reads(tree: ast.FunctionDef, parents: dict[ast.AST, ast.AST]) -> Iterator[str]:
    for node in ast.walk(tree):
        if called(node) != "arguments":
            continue
        above = parents[node]
        if isinstance(above, ast.Assign) and isinstance(above.targets[0], ast.Name):
            name = above.targets[0].id
            uses = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name]
            parents_of_uses = [parents[use] for use in uses if isinstance(use.ctx, ast.Load)]
        else:
            parents_of_uses = [above]
        for use in parents_of_uses:
            key = use.slice if isinstance(use, ast.Subscript) else None
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                raise ValueError(f"{tree.name} reads arguments otherwise than by a constant name")
            yield key.value


def _items(tree: ast.FunctionDef, parents: dict[ast.AST, ast.AST]) -> tuple[tuple[str, ...], bool]:
    """Return the names into which a wrapper unpacks the wrapped function's result.
    Also return whether the result may have more items than these.
    """
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
        return (), False
    (target,) = unpacked
    or_more = isinstance(target.elts[-1], ast.Starred)
    elements = target.elts[:-1] if or_more else target.elts
    return tuple(map(_last_name, elements)), or_more


def _calls_original(node: ast.Call) -> bool:
    if called(node) == "arguments":
        return False
    callees = [node.func, *node.args]
    return any(isinstance(callee, ast.Name) and callee.id == "original" for callee in callees)


def _keywords(tree: ast.FunctionDef) -> Iterator[str]:
    """Yield the names of the keyword arguments that a wrapper passes to the function it wraps."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) == "original":
            yield from (keyword.arg for keyword in node.keywords if keyword.arg is not None)


def _last_name(target: ast.expr) -> str:
    if isinstance(target, ast.Attribute):
        return target.attr
    if isinstance(target, ast.Name):
        return target.id
    raise ValueError(f"the result is unpacked into {ast.unparse(target)}, which has no name")
