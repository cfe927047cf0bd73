"""Changed sources of the six functions where an unreviewed body may be wrapped."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import MODULES, Result, source_of
from events import Pipe
from mutants import REPAIRS, Mutant, cosmetic, mutants

from megatron_idempotent.patching import Target
from megatron_idempotent.patching.base import MEGATRON
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.contract import contract_of
from megatron_idempotent.patching.decide import review
from megatron_idempotent.patching.evidence import Bodies
from megatron_idempotent.patching.releases import installed, supported
from megatron_idempotent.patching.source import Body, locate, parse_body, read_body

#: Mutants that are run, of each function: 2,000 in all, a second or two each.
COUNTS = {
    "train": 500,
    "train_step": 350,
    "evaluate": 350,
    "save": 300,
    "get_megatron_optimizer": 250,
    "model_parallel_cuda_manual_seed": 250,
}

CHANGES_OF_KIND = ("another_kind", "decorated")
#: A repair in other words that shows only when it runs: the wrapper looks at what it has done.
SEEN_WHEN_RUN = {"grad-scale-func", "train-iteration-lost"}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        locate(MODULES["train"]) is None, reason="no megatron.training is installed"
    ),
]


@functools.cache
def mutants_of(function: str) -> list[Mutant]:
    return mutants(source_of(function))


def targets_of(function: str) -> Iterator[Target]:
    address = f"{MODULES[function]}:{function}"
    for patch in patches().values():
        yield from (target for target in patch.targets if target.address == address)


def installed_body(target: Target) -> Body:
    path = locate(target.module)
    body = path and read_body(path, target.qualname)
    assert body
    return body


@pytest.mark.parametrize("function", MODULES)
def test_a_signature_a_kind_or_a_decorator_that_the_wrapper_cannot_have_is_refused(function):
    targets = list(targets_of(function))
    named = {name for each in targets for name in _asked_for(each)}
    refused = 0
    for mutant in mutants_of(function):
        renames = mutant.operator in ("rename_parameter", "parameter_from_kwargs")
        wanted = mutant.site in named if renames else mutant.operator in CHANGES_OF_KIND
        body = parse_body(mutant.source or "", function) if wanted else None
        if body is None:
            continue
        for target in targets:
            if not renames or mutant.site in _asked_for(target):
                assert not review(target, body)[0], f"{target.wrapper.__module__}: {mutant}"
                refused += 1
    assert refused >= 10 * len(targets)


def test_a_repair_in_other_words_is_refused_or_seen_when_it_runs():
    for patch_id, (function, _, _) in REPAIRS.items():
        (mutant,) = (m for m in mutants_of(function) if m.site == patch_id)
        body = parse_body(mutant.source or "", function)
        assert body is not None
        patch = patches()[patch_id]
        (target,) = (each for each in targets_of(function) if each in patch.targets)
        bodies = {other.address: installed_body(other) for other in patch.targets}
        assert not patch.fixed_when(Bodies({**bodies, target.address: body}))
        assert review(target, body)[0] == (patch_id in SEEN_WHEN_RUN)
    detecting = {
        name
        for name, patch in patches().items()
        if patch.fixed_when is not None
        and patch.distribution == MEGATRON
        and supported(installed(MEGATRON), patch.since, patch.before)
    }
    ours = {each.address for function in MODULES for each in targets_of(function)}
    around = {n for n in detecting if ours & {each.address for each in patches()[n].targets}}
    assert around == set(REPAIRS)


def _asked_for(target: Target) -> set[str]:
    contract = contract_of(target.wrapper)
    return {*contract.reads, *contract.leading}


@pytest.mark.parametrize("function", MODULES)
def test_the_same_code_in_other_words_is_the_same_body(function):
    source = source_of(function)
    body = parse_body(source, function)
    assert body is not None
    for label, text in cosmetic(source):
        changed = parse_body(text, function)
        assert changed is not None
        assert changed.hash == body.hash, label


def test_a_pipe_ends_with_its_child_although_a_process_that_the_child_left_holds_it():
    pipe = Pipe()
    child = os.fork()
    if not child:
        os.setpgrp()
        pipe.say("the child")
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)  # after which a test that waits for it fails; it is killed before
        pipe.say("what it left")
        os._exit(0)
    assert pipe.last("nothing", child) == "the child"
    assert os.waitpid(child, 0) == (child, signal.SIGKILL)
    os.killpg(child, signal.SIGKILL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("function", COUNTS)
def test_no_mutant_is_applied_that_makes_patched_differ_from_stock_where_stock_works(function):
    bench = Path(__file__).with_name("bench.py")
    command = [sys.executable, str(bench), function, str(COUNTS[function])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    results = [Result(*json.loads(line)) for line in done.stdout.splitlines()]
    assert len(results) == COUNTS[function]
    assert not [f"{r.label} ({', '.join(r.applied)}): {r.harm}" for r in results if r.harm]
    # The programs have seen something: a good part was applied, and works on stock.
    assert sum(result.worked > 0 for result in results) > len(results) / 4
