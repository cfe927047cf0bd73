"""Changes beside the functions that are wrapped: whatever a wrapper needs there, it is missed.

A mutant changes the installed sources by rule, and bytecode says which wrappers use what was
changed; the engine reads their source.
"""

from __future__ import annotations

import builtins
import dis
import functools
import random
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from mutants import Around, detours, renames, slots

import megatron_idempotent
from megatron_idempotent.cli.reads import elsewhere, installed_trees
from megatron_idempotent.patching.catalog import MEGATRON, patches
from megatron_idempotent.patching.decide import judge
from megatron_idempotent.patching.record import Patch
from megatron_idempotent.patching.trees import SourceTree

torch = pytest.importorskip("torch")

COUNT = 2
#: Names of Python and torch that bytecode mentions, and of variables in upstream's closures, whose
#: absence the wrapper copes with.
_OTHERS = frozenset({*dir(builtins), *dir(torch), "start", "end"})
TREES = installed_trees()
pytestmark = pytest.mark.skipif(not TREES, reason="no megatron-core is installed")
ROOT = Path(megatron_idempotent.__file__).parent


class Changed(SourceTree):
    """The installed Megatron with one mutant in it."""

    def __init__(self, mutant: Around) -> None:
        vars(self).update(vars(TREES[0]), _texts={}, mutant=mutant)

    def text(self, module: str) -> str | None:
        if module not in self._texts:
            text = TREES[0].text(module)
            self._texts[module] = None if text is None else self.mutant.change(module, text)
        return self._texts[module]


def verdict(patch: Patch, tree: SourceTree) -> tuple[bool, str]:
    """Return whether the patch would be applied to the tree, and why or why not."""
    bodies = {t.address: tree.body(t.module, t.qualname) for t in patch.targets}
    found = judge(patch, bodies, tree, None, named=False)
    return found.status is None, found.reason


@functools.cache
def applied() -> list[Patch]:
    """Patch of Megatron that the installed one gets."""
    return [
        patch
        for patch in patches().values()
        if patch.distribution == MEGATRON and verdict(patch, TREES[0])[0]
    ]


@functools.cache
def mentioned(patch_id: str) -> frozenset[str]:
    """Names that a patch's wrappers, and functions of ours that these use, have in bytecode."""
    found: set[str] = set()
    done: set[int] = set()
    waiting: list[object] = [target.wrapper for target in patches()[patch_id].targets]
    while waiting:
        each = waiting.pop()
        if id(each) in done:
            continue
        done.add(id(each))
        if isinstance(each, type) and _is_ours(each):
            waiting += vars(each).values()
        elif isinstance(each, types.FunctionType) and _is_ours(each):
            found.update(_names(each.__code__, each.__globals__))
            waiting += _reached(each)
        elif isinstance(each, str):
            found.add(each)
    return frozenset(found)


def _reached(function: types.FunctionType) -> Iterator[object]:
    """Yield globals that a function uses, and items of our modules."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        value: object = None
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, types.ModuleType):
                value = getattr(value, step.argval, None) if _is_ours(value) else None
            elif step.opname == "LOAD_GLOBAL":
                value = function.__globals__.get(step.argval)
            else:
                value = None
            yield value


def _is_ours(each: object) -> bool:
    name = str(getattr(each, "__module__", None) or getattr(each, "__name__", ""))
    return name.startswith(("megatron_idempotent.patches.", "megatron_idempotent.megatron."))


def _names(code: types.CodeType, known: Mapping[str, object]) -> Iterator[str]:
    of_ours = False
    for step in dis.get_instructions(code):
        # A global is ours, or was imported by a step with its name; so is what our modules have.
        if step.argval in code.co_names and step.opname != "LOAD_GLOBAL" and not of_ours:
            yield step.argval
        module = known.get(step.argval) if step.opname == "LOAD_GLOBAL" else None
        of_ours = getattr(module, "__name__", "").startswith("megatron_idempotent.")
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each, known)
        elif isinstance(each, str):
            yield each
        elif isinstance(each, tuple) and "return" not in each:  # else a function's annotations
            yield from (item for item in each if isinstance(item, str))


def all_mutants() -> list[Around]:
    targets = [target for patch in applied() for target in patch.targets]
    found = (
        *renames(TREES[0].text, targets, without=elsewhere() | _OTHERS),
        *slots(TREES[0].text, targets),
        *detours(targets),
    )
    return [
        mutant
        for mutant in found
        if any(mutant.concerns(each, mentioned(each.id)) is not None for each in applied())
    ]


def wrong(mutant: Around) -> Iterator[str]:
    """Yield a sentence for each patch that the engine decides wrongly on a mutant."""
    tree = Changed(mutant)
    for patch in applied():
        concerned = mutant.concerns(patch, mentioned(patch.id))
        if concerned is None:
            continue
        goes, reason = verdict(patch, tree)
        if goes is concerned:
            yield f"{mutant}: {patch.id} is {'applied' if goes else 'refused'} ({reason})"


def test_a_sample_of_changes_around_wrapped_functions_is_refused_by_name():
    by_kind: dict[str, list[Around]] = {}
    for each in all_mutants():
        by_kind.setdefault(each.operator, []).append(each)
    assert sum(map(len, by_kind.values())) >= 400
    generator = random.Random(0)
    chosen = [m for kind in by_kind.values() for m in generator.sample(kind, min(COUNT, len(kind)))]
    assert not [said for mutant in chosen for said in wrong(mutant)]


@pytest.mark.exhaustive
def test_no_change_around_a_wrapped_function_is_applied_that_its_wrapper_cannot_have():
    assert not [said for mutant in all_mutants() for said in wrong(mutant)]
