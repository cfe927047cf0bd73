"""Put a mutant in upstream's place, apply the patches or not, run programs, say what they did.

As a script: `python bench.py FUNCTION COUNT` samples so many mutants of the function and prints
one `Result` in JSON a line. It imports torch and Megatron, and forks a child for every run. What
is judged and patched is what `apply()` finds: the module's file is a copy with the mutant in it,
and the function that runs was compiled from that file.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import faulthandler
import importlib
import json
import logging
import os
import resource
import signal
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import mutants
import programs
from events import Event, Pipe, compare

from megatron_idempotent.patching.source import imports_of, locate
from megatron_idempotent.proof import cpu

MODULES = {
    "train": "megatron.training.training",
    "train_step": "megatron.training.training",
    "evaluate": "megatron.training.training",
    "save": "megatron.core.dist_checkpointing.serialization",
    "get_megatron_optimizer": "megatron.core.optimizer",
    "model_parallel_cuda_manual_seed": "megatron.core.tensor_parallel.random",
}
#: CPU seconds of one child. A program takes a fifth of one.
CPU_S = 6
#: The environment of the only rank there is.
ALONE = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"), "1"),
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
}
#: Mutants after which results are printed.
_AT_ONCE = 20
LOUD = bool(os.environ.get("FUZZ_LOUD"))


class Seen(NamedTuple):
    """Results of one run."""

    statuses: dict[str, str]
    """Status and reason of the patches around the function; empty in a stock run."""
    events: list[list[Event]]
    """Events of each program."""
    died: str = ""
    """Tells how a process ended, if not well."""


class Result(NamedTuple):
    """One mutant, stock and patched."""

    label: str
    applied: tuple[str, ...]
    refused: dict[str, str]
    """Why, for the patches that were not applied."""
    harm: str
    """Returns how stock and patched differ where stock works; empty where they don't."""
    worked: int
    """Calls that work on stock, where any patch was applied."""


def examine(label: str, function: str, source: str) -> Result:
    """Run one mutant patched and, where any patch was applied, stock."""
    patched = run(function, source, patched=True)
    refused = {i: said for i, said in patched.statuses.items() if not said.startswith("applied")}
    applied = tuple(sorted(set(patched.statuses) - set(refused)))
    if not patched.statuses:
        return Result(label, (), {}, f"apply() died: {patched.died}", 0)
    if not applied:
        return Result(label, (), refused, "", 0)
    stock = run(function, source, patched=False)
    harms, worked = [], 0
    for ours, theirs in zip_longest(stock.events, patched.events, fillvalue=()):
        harm, calls = compare(ours, theirs, patched.died)
        worked += calls
        harms += [harm] if harm else []
    return Result(label, applied, refused, "; ".join(harms), worked)


def examine_all(work: Sequence[tuple[str, str, str]], jobs: int = 1) -> list[Result]:
    """`examine` for each (label, function, source), so many at once, in their order."""
    found: list[Result | None] = [None] * len(work)
    children = []
    for job in range(jobs):
        mine = work[job::jobs]
        pipe = Pipe()
        pid = _child(pipe, lambda mine=mine, pipe=pipe: pipe.say([examine(*one) for one in mine]))
        children.append((job, pid, pipe))
    for job, pid, pipe in children:
        found[job::jobs] = pipe.last(None, pid)
        os.waitpid(pid, 0)
    return found  # type: ignore[return-value]


def run(function: str, source: str, *, patched: bool) -> Seen:
    """One child."""
    pipe = Pipe()
    pid = _child(pipe, lambda: _limited(lambda: _run(pipe, function, source, patched)))
    seen = pipe.last(Seen({}, [], "said nothing"), pid)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it has left
    return seen._replace(died=f"ended with {status}") if seen.died else seen  # type: ignore[no-any-return]


def _child(pipe: Pipe, work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.close(pipe.receive)
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - nobody else would hear of it
        if LOUD:
            traceback.print_exc()
    finally:
        os._exit(code)


def _limited(work: Callable[[], None]) -> None:
    """Runs in a process group of its own, which ends with it."""
    os.setpgrp()
    if LOUD:
        faulthandler.dump_traceback_later(CPU_S)
    else:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    signal.alarm(10 * CPU_S)
    try:
        work()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)


def _run(pipe: Pipe, function: str, source: str, patched: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        put(function, source, Path(folder))
        statuses = _apply(function) if patched else {}
        pipe.say(Seen(statuses, [], "died"))
        events: list[list[Event]] = []
        died = ""
        if not patched or any(said.startswith("applied") for said in statuses.values()):
            for program in programs.PROGRAMS[function]:
                own = Pipe()
                child = _child(own, lambda own=own, program=program: _tell(own, program))
                events.append(own.last([], child))
                _, status = os.waitpid(child, 0)
                died = died or (f"ended with {status}" if status else "")
        pipe.say(Seen(statuses, events, died))


def _tell(pipe: Pipe, program: Callable[[], Iterator[Event]]) -> None:
    events = []
    for event in program():
        events.append(event)
        pipe.say(events)


def _apply(function: str) -> dict[str, str]:
    import megatron_idempotent
    from megatron_idempotent.patching.catalog import patches

    address = f"{MODULES[function]}:{function}"
    around = {p.id for p in patches().values() if address in [t.address for t in p.targets]}
    os.environ["MEGATRON_IDEMPOTENT_CHECK"] = "1"
    report = megatron_idempotent.apply(exclude=set(patches()) - around)
    return {i: f"{report[i].status}: {report[i].reason}" for i in around}


def put(function: str, source: str, folder: Path) -> None:
    """Make the mutant what the module's file says and what the module, and every name, holds."""
    module = importlib.import_module(MODULES[function])
    text, start, stop = _extent(function)
    lines = text.splitlines(keepends=True)
    path = folder / Path(str(module.__file__)).name
    # What stands after it stays where it is.
    source += "\n" * (stop - start - source.count("\n"))
    _move_down(module, start, source.count("\n") - (stop - start))
    path.write_text("".join([*lines[:start], source, *lines[stop:]]))
    before = vars(module)[function]
    module.__file__ = str(path)
    flags = before.__code__.co_flags & __future__.annotations.compiler_flag
    tree = ast.parse("\n" * start + source)
    # Calls of what a module imports are compiled in their own way, so the imports are shown to the
    # compiler; and not run again.
    tree.body.insert(0, ast.If(ast.Constant(0), list(imports_of(text)), []))
    code = compile(ast.fix_missing_locations(tree), str(path), "exec", flags, dont_inherit=True)
    exec(code, vars(module))
    after = vars(module)[function]
    for other in list(sys.modules.values()):
        if isinstance(other, types.ModuleType):
            for name in [name for name, value in vars(other).items() if value is before]:
                setattr(other, name, after)


def _move_down(module: types.ModuleType, start: int, count: int) -> None:
    # Of the functions that patches of this one go around, too.
    for name, home in MODULES.items():
        other = vars(module).get(name)
        if count and home == module.__name__ and other.__code__.co_firstlineno > start + 1:
            first = other.__code__.co_firstlineno + count
            other.__code__ = other.__code__.replace(co_firstlineno=first)


def source_of(function: str) -> str:
    """The function's source in the installed release, from its first decorator on."""
    text, start, stop = _extent(function)
    return "".join(text.splitlines(keepends=True)[start:stop])


@cache
def _extent(function: str) -> tuple[str, int, int]:
    path = locate(MODULES[function])
    assert path is not None
    text = path.read_text()
    (node,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    assert node.end_lineno is not None
    return text, first - 1, node.end_lineno


def main(function: str, count: int) -> None:
    """Sample, examine and print, two mutants at a time."""
    _extent(function)  # as it was installed: runs put another file in the module's place
    programs.warm_up(function)
    chosen = mutants.sample(mutants.mutants(source_of(function)), count, seed=0)
    work = [(str(mutant), function, mutant.source or "") for mutant in chosen]
    for start in range(0, count, _AT_ONCE):
        for result in examine_all(work[start : start + _AT_ONCE], jobs=2):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    os.environ |= ALONE
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    cpu.enable()
    main(sys.argv[1], int(sys.argv[2]))
