"""Changes beside the functions that are wrapped: whatever a wrapper needs there, it is missed.

A mutant changes the installed sources by rule, and bytecode says which wrappers use what was
changed; the engine reads their source.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import inspect
import random
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from changed import TREES, Changed, applied, verdict
from mutants import (
    PROPERTIES,
    SHAPES,
    Around,
    detours,
    keywords,
    properties,
    renames,
    shapes,
    slots,
)
from reads import elsewhere

import megatron_idempotent
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.record import Patch

torch = pytest.importorskip("torch")

COUNT = 2
BUFFER = "megatron.core.transformer.moe.moe_utils"
#: Names of Python and torch that bytecode mentions, and of variables in upstream's closures, whose
#: absence the wrapper copes with.
_OTHERS = frozenset({*dir(builtins), *dir(torch), "start", "end"})
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not TREES, reason="no megatron-core is installed"),
]
ROOT = Path(megatron_idempotent.__file__).parent


def after(mutant: Around) -> Changed:
    """Return the installed Megatron with one mutant in it."""
    return Changed(lambda module, text: None if text is None else mutant.change(module, text))


@functools.cache
def reached(patch_id: str) -> tuple[list[Any], frozenset[str]]:
    """Functions and classes of ours that a patch's wrappers use, and the texts in their tables."""
    found: list[Any] = []
    texts: set[str] = set()
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
            found.append(each)
            waiting += _reached(each)
        elif isinstance(each, str):
            texts.add(each)
        elif isinstance(each, (tuple, list, frozenset)):  # a table of names
            waiting += each
    return found, frozenset(texts)


@functools.cache
def mentioned(patch_id: str) -> frozenset[str]:
    """Names that a patch's wrappers, and functions of ours that these use, have in bytecode."""
    functions, texts = reached(patch_id)
    return texts.union(*(_names(each.__code__, each.__globals__) for each in functions))


def _code(patch_id: str) -> str:
    """The code of these functions, without what their docstrings and comments say."""
    parts = (ast.parse(textwrap.dedent(inspect.getsource(f))) for f in reached(patch_id)[0])
    return "\n".join(map(ast.unparse, parts))


@functools.cache
def passed(patch_id: str) -> frozenset[tuple[str, str]]:
    """Names of functions with the keywords that a patch's wrappers pass to them, by their text."""
    calls = re.findall(r"(\w+)\(((?:[^()]|\([^()]*\))*)\)", _code(patch_id))
    return frozenset(
        (name, keyword)
        for name, arguments in calls
        for keyword in re.findall(r"(?:^|, )(\w+)=(?!=)", arguments)
        if name not in elsewhere() | _OTHERS | {*dir(torch.distributed), "original"}
    )


@functools.cache
def assigned(patch_id: str) -> frozenset[str]:
    """Names of attributes that a patch's wrappers set, by their bytecode and text."""
    steps = (s for f in reached(patch_id)[0] for s in dis.get_instructions(f))
    stored = {s.argval for s in steps if s.opname in ("STORE_ATTR", "DELETE_ATTR")}
    by_name = re.findall(r"setattr\(\w+, '(\w+)'", _code(patch_id))
    # In capitals they are a class's own, which may be set.
    return frozenset(n for n in {*stored, *by_name} - elsewhere() if not n.isupper())


@functools.cache
def taken_apart(patch_id: str) -> frozenset[str]:
    """Names of functions whose results a patch's wrappers take apart, by their text."""
    code = _code(patch_id)
    call = r"(?:\w+(?:\(\))?\.)*(\w+)\((?:[^()]|\([^()]*\))*\)"
    walked = re.findall(rf"(?:\bin |\*\*|\b(?:zip|list|dict|sorted|len|next)\(){call}", code)
    indexed = re.findall(rf"{call}(?:\[|\.(?:items|values|keys|get)\()", code)
    unpacked = re.findall(rf"^\s*\w+, [\w, *]*= {call}$", code, re.MULTILINE)
    trees = dir(torch.utils._pytree)
    return frozenset({*walked, *indexed, *unpacked}).difference(elsewhere(), _OTHERS, trees)


#: Operators that concern what is done with a name, and not each mention of it.
USED: dict[str, Any] = {
    "keyword": passed,
    **dict.fromkeys(PROPERTIES, assigned),
    **dict.fromkeys(SHAPES, taken_apart),
}


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
    upstream = list(dict.fromkeys(m for t in targets for m in TREES[0].beside(t.module)))
    union = functools.partial(frozenset[Any]().union)
    found = (
        *renames(TREES[0].text, targets, without=elsewhere() | _OTHERS),
        *slots(TREES[0].text, targets),
        *detours(targets),
        *keywords(TREES[0].text, upstream, union(*(passed(each.id) for each in applied()))),
        *properties(TREES[0].text, upstream, union(*(assigned(each.id) for each in applied()))),
        *shapes(TREES[0].text, upstream, union(*(taken_apart(each.id) for each in applied()))),
    )
    return [m for m in found if any(_concerned(m, each) is not None for each in applied())]


def _concerned(mutant: Around, patch: Patch) -> bool | None:
    return mutant.concerns(patch, USED.get(mutant.operator, mentioned)(patch.id))


def wrong(mutant: Around) -> Iterator[str]:
    """Yield a sentence for each patch that the engine decides wrongly on a mutant."""
    tree = after(mutant)
    for patch in applied():
        concerned = _concerned(mutant, patch)
        if concerned is None:
            continue
        decided = verdict(patch, tree)
        if (decided.status is None) is concerned:
            yield f"{mutant}: {patch.id} is {decided.status or 'applied'} ({decided.reason})"


def test_a_sample_of_changes_around_wrapped_functions_is_refused_by_name():
    by_kind: dict[str, list[Around]] = {}
    for each in all_mutants():
        by_kind.setdefault(each.operator, []).append(each)
    assert sum(map(len, by_kind.values())) >= 400
    generator = random.Random(0)
    chosen = [m for kind in by_kind.values() for m in generator.sample(kind, min(COUNT, len(kind)))]
    assert not [said for mutant in chosen for said in wrong(mutant)]


#: Consistent changes that were applied and broke a right step: module, text, other text, a patch
#: that must not be applied then, and what is said.
BREAKING = (
    (
        "distributed.param_and_grad_buffer",
        r"\bskip_next_bucket_dispatch\b",
        "skip_next",
        "pending-gather-dropped",
        "takes no `skip_next_bucket_dispatch`",
    ),
    ("timers", "_started", "", "timers-left-running", "lets nobody set `_started`"),
    (
        "optimizer_param_scheduler",
        "num_steps",
        "",
        "scheduler-load-adds-steps",
        "lets nobody set `num_steps`",
    ),
    (
        "distributed.param_and_grad_buffer",
        "grad_reduce_handle",
        "",
        "reduction-outlives-its-window",
        "lets nobody set `grad_reduce_handle`",
    ),
    (
        "distributed.param_and_grad_buffer",
        "per_param_grad_ready_counts",
        "",
        "first-window-aborted",
        "lets nobody set `per_param_grad_ready_counts`",
    ),
    (
        "rerun_state_machine",
        "initial_result",
        "",
        "rerun-state-after-exception",
        "lets nobody set `initial_result`",
    ),
    (
        "rerun_state_machine",
        "failed_validation_call",
        "",
        "rerun-state-after-exception",
        "lets nobody set `failed_validation_call`",
    ),
    (
        "tensor_parallel.random",
        r"return states\n",
        "return states.items()\n",
        "pipeline-seed-offset",
        "get_states returns something else",
    ),
    (
        "",
        r"\bMoEAuxLossAutoScaler\b",
        "MoELossScaler",
        "aux-loss-scale-left-set",
        "defines no `MoEAuxLossAutoScaler`",
    ),
)


@pytest.mark.parametrize(("home", "old", "new", "patch_id", "says"), BREAKING)
def test_a_consistent_change_that_would_break_a_right_step_is_refused(
    home, old, new, patch_id, says
):
    def change(module: str, text: str) -> str:
        if home and module != f"megatron.core.{home}":
            return text
        if new:
            return re.sub(old, new, text)
        below = re.sub(rf"\bself\.{old}\b", f"self._{old}_now", text)
        ends = [
            each.end() for each in re.finditer(rf"^        self\._{old}_now = .*\n", below, re.M)
        ]
        made = f"\n    @property\n    def {old}(self):\n        return self._{old}_now\n"
        for end in ends[:1] if home != "timers" else ends:
            after = re.compile(r"^(?=    (?:def|@)|\S)", re.M).search(below, end)
            assert after is not None
            below = below[: after.start()] + made.lstrip("\n") + "\n" + below[after.start() :]
        return below

    (patch,) = [patch for patch in applied() if patch.id == patch_id]
    mutant = Around("breaking", old, change, lambda patch, used: True)
    texts = [
        change(m, TREES[0].text(m) or "") for m in [f"megatron.core.{home}" if home else BUFFER]
    ]
    assert texts != [TREES[0].text(f"megatron.core.{home}" if home else BUFFER)]
    decided = verdict(patch, after(mutant))
    assert decided.status is not None
    assert says in decided.reason


@pytest.mark.exhaustive
def test_no_change_around_a_wrapped_function_is_applied_that_its_wrapper_cannot_have():
    assert not [said for mutant in all_mutants() for said in wrong(mutant)]
