"""Bodies that are known by their hash: whatever is changed in one, its patch is refused.

Of what is installed, or first on the path: `make pins` runs this on every commit.
"""

from __future__ import annotations

import ast
import random

import pytest
from mutants import Mutant, drawn, mutants

from megatron_idempotent.cli.statements import accepted, change, statements
from megatron_idempotent.patching.base import MEGATRON
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.decide import review
from megatron_idempotent.patching.source import Body, locate, parse_body, read_body


def _pinned() -> dict[str, tuple[Body, list]]:
    """Map an address to the function's body here, and every target that pins it and accepts it."""
    found: dict[str, tuple[Body, list]] = {}
    for patch in patches().values():
        for target in patch.targets:
            path = locate(target.module) if patch.distribution == MEGATRON else None
            body = read_body(path, target.qualname) if path is not None else None
            if body is not None and body.hash in target.reviewed and not target.relies_on:
                found.setdefault(target.address, (body, []))[1].append(target)
    return found


PINNED = _pinned()


def _source(address: str) -> str:
    return ast.unparse(PINNED[address][0].tree)


def _refused(address: str, changes: list[Mutant]) -> int:
    body, targets = PINNED[address]
    refused = 0
    for mutant in changes:
        changed = parse_body(mutant.source or "", body.tree.name)
        if changed is None or changed.hash == body.hash:
            continue  # no program, or the same in other words
        for target in targets:
            assert not review(target, changed)[0], str(mutant)
        found = change(changed, targets[0].reviewed)
        assert found is not None
        assert found.new + found.gone, str(mutant)
        refused += 1
    return refused


def test_a_body_pinned_by_its_hash_is_refused_whatever_is_changed_in_it(megatron):
    generator = random.Random(0)
    assert sum(_refused(each, [drawn(_source(each), generator)]) for each in PINNED) >= 37


@pytest.mark.exhaustive
@pytest.mark.parametrize("address", PINNED)
def test_every_mutant_of_a_pinned_body_is_refused(address):
    assert _refused(address, mutants(_source(address)))


def test_the_statements_of_every_body_that_was_read_are_shipped():
    read = {name for patch in patches().values() for t in patch.targets for name in t.reviewed}
    assert set(accepted()) == read
    for body, _ in PINNED.values():
        assert tuple(each.hash for each in statements(body)) == accepted()[body.hash]
