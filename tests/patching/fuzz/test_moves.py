"""Code that upstream moves stays in sight: a patch follows it, or is refused and says so.

Each patched function is moved out of its module, which binds it by import; and its body is moved
into a helper that it calls. Neither repairs a hazard.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Mapping

import pytest
from changed import TREES, Changed, applied, verdict

from megatron_idempotent.patching.base import Place

pytestmark = pytest.mark.skipif(not TREES, reason="no megatron-core is installed")
COUNT = 12
Changes = Mapping[str, str]
"""Maps modules to their texts after a change."""


def moved(place: Place) -> Changes | None:
    """Move a top-level function or class into a module beside its own, which imports it."""
    text = TREES[0].text(place.module)
    assert text is not None
    name = place.qualname.partition(".")[0]
    node = next((s for s in ast.parse(text).body if getattr(s, "name", None) == name), None)
    if node is None:
        return None  # it is bound by import already
    lines = text.splitlines(keepends=True)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])  # type: ignore[attr-defined]
    rest = [*lines[: first - 1], *lines[node.end_lineno :]]
    beside = f"{place.module}_moved"
    return {place.module: "".join([*rest, f"\nfrom {beside} import {name}\n"]), beside: text}


def delegated(place: Place) -> Changes | None:
    """Move a function's body into one beside it, which it calls with its parameters."""
    text = TREES[0].text(place.module)
    assert text is not None
    body, owner, node = ast.parse(text).body, None, None
    for part in place.qualname.split("."):
        owner = node
        node = next((s for s in body if getattr(s, "name", None) == part), None)
        body = getattr(node, "body", [])
    if not isinstance(node, ast.FunctionDef):
        return None
    parts = node.body[1:] if ast.get_docstring(node) else node.body
    is_generator = any(isinstance(each, (ast.Yield, ast.YieldFrom)) for each in ast.walk(node))
    if not parts or is_generator or (owner is not None and node.decorator_list):
        return None
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    star = [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    keywords = [each.arg for each in arguments.kwonlyargs]
    rest = [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    helper = f"_{node.name.strip('_')}_impl"
    # A method of a class is called on its object, which is its first parameter.
    callee, passed = (f"{names[0]}.{helper}", names[1:]) if owner is not None else (helper, names)
    call = ", ".join([*passed, *star, *(f"{name}={name}" for name in keywords), *rest])
    taken = ", ".join([*names, *(star or (["*"] if keywords else [])), *keywords, *rest])
    margin, inner = " " * node.col_offset, " " * parts[0].col_offset
    first = min([parts[0].lineno, *(d.lineno for d in getattr(parts[0], "decorator_list", ()))])
    lines = text.splitlines(keepends=True)
    added = f"{inner}return {callee}({call})\n\n{margin}def {helper}({taken}):\n"
    changed = "".join([*lines[: first - 1], added, *lines[first - 1 :]])
    ast.parse(changed)
    return {place.module: changed}


CHANGES = {"moved": moved, "delegated": delegated}


def all_places() -> list[Place]:
    addresses = dict.fromkeys(t.address for patch in applied() for t in patch.targets)
    return [Place(address=address) for address in addresses]


def unseen(kind: str, place: Place) -> Iterator[str] | None:
    """Yield a sentence for each patch that a change puts out of sight; None if there is none."""
    texts = CHANGES[kind](place)
    if texts is None:
        return None
    tree = Changed(lambda module, text: texts.get(module, text))
    concerned = [p for p in applied() if place.address in {t.address for t in p.targets}]
    decisions = [(patch.id, verdict(patch, tree)) for patch in concerned]
    return (
        f"{kind} {place.address}: {id} is {decided.status}: {decided.reason}"
        for id, decided in decisions
        if decided.status not in (None, "drifted")
    )


def run(places: list[Place]) -> tuple[list[str], int]:
    """Return what is wrong, and how many changes were made."""
    said, number = [], 0
    for kind in CHANGES:
        for place in places:
            found = unseen(kind, place)
            if found is not None:
                said += found
                number += 1
    return said, number


def test_a_sample_of_moved_functions_is_followed_or_refused():
    said, number = run(random.Random(0).sample(all_places(), COUNT))
    assert said == []
    assert number >= COUNT


@pytest.mark.exhaustive
def test_every_moved_function_is_followed_or_refused():
    said, number = run(all_places())
    assert said == []
    assert number >= 150
