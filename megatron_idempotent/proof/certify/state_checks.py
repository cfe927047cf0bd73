"""Defines the checks of state: a run that was saved, loaded or moved goes on as one that was not.

Each later step must have the bits of the same step in an undisturbed run: gradient norm and loss,
weights, optimizer and other state, on each rank. If a format rounds, plain copies round the run
that is compared with.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .checks import CHECKS, Check, entering
from .faults import (
    LATER,
    SPOILT,
    Stamps,
    attempt,
    ending_hangs,
    first_line,
    no_memory,
    no_room,
    saved_files,
    slow_disk,
    stamps,
)
from .protocol import PUT, Wrong

if TYPE_CHECKING:
    from .states import Snapshot, States

_checks: dict[str, Check] = {}
STATE_CHECKS: Mapping[str, Check] = MappingProxyType(_checks)
"""The checks of state by name, in the order in which they are made."""

_SAVES = ("save", "load")
#: A check needs both, unless it says otherwise.
_check = entering(_checks, needs=_SAVES)


@_check("a save, and two in a row, change nothing, and steps go on as without", needs=("save",))
def save_and_go_on(bench: States) -> None:
    bench.run_through()
    adapter = bench.adapter
    bench.advance(0)
    with bench.keeping("save()"):
        adapter.save()
    bench.follow(1, "save()")
    adapter.save()
    adapter.save()
    bench.follow(2, "two saves")


@_check(
    "a run that is loaded into a new model, and again of a save right after, goes on as it was",
)
def load_into_new_model(bench: States) -> None:
    state = _saved_after_two(bench)
    for cause in ("load()", "load() of what was saved right after a load()"):
        bench.begin_in("again")
        bench.load(state, cause=cause)
        state = _saved(bench)
        bench.follow(2, cause)


@_check(
    "a run that is loaded over one that has gone on elsewhere goes on as it was saved",
    hazards=("reload-misses-offloaded-copies", "offloaded-optimizer-loads-wrong"),
)
def load_into_live_run(bench: States) -> None:
    state = _saved_after_two(bench)
    bench.begin_again()
    bench.advance(7, 8)  # as many steps: a loader may look at their number
    bench.load(state)
    bench.follow(2, "load()")


@_check("a run goes back to the step before, twice, and takes it again")
def rollback(bench: States) -> None:
    state = _saved_after_two(bench)
    for time in ("first", "second"):
        bench.advance(5)
        bench.load(state, cause=f"the {time} load() in place")
        bench.follow(2, f"the {time} load() in place")
    if bench.offers("export"):
        # Of two states at one iteration.
        _hold_export(bench)
        bench.load(state, cause="the third load() in place")
        bench.advance(5)
        _hold_export(bench)


def _hold_export(bench: States) -> None:
    bench.parameters = bench.gather_parameters()
    bench.hold_export(bench.adapter.export())


@_check(
    "of two saves of a run that went back and took another step, each is what it was, or the later "
    "one is refused",
)
def saved_again(bench: States) -> None:
    from .states import first_difference

    adapter = bench.adapter
    bench.advance(0)
    older, after_one = _save_aside(bench)
    bench.advance(1)
    first_snapshot, first = bench.snapshot(), _saved(bench)
    for save in _saves(bench):
        adapter.load(older)
        bench.put(after_one)
        bench.advance(5)
        later_snapshot = bench.snapshot()
        fault, later = attempt(_saved, bench, save)
        is_refused = bench.refused(fault, f"a later {save}() is refused", "takes it")
        bench.advance(6)
        if not is_refused:
            cause = f"load() of a later {save}() after as many steps"
            bench.load(later, later_snapshot, cause=cause)
        if any(bench.gather(first_difference(first, later))):  # else it replaced the first
            cause = f"load() of what was saved before a later {save}()"
            bench.load(first, first_snapshot, cause=cause)


def _saved_after_two(bench: States) -> Any:
    """Record the undisturbed run, run its first two steps again in a new model, and return what the
    adapter's `save` returns then.
    """
    bench.run_through()
    bench.advance(0, 1)
    state = _saved(bench)
    bench.hold_saved(state)
    return state


def _saved(bench: States, save: str = "save") -> Any:
    """Call the adapter's method `save`, wait until all is written, and return its result."""
    state = getattr(bench.adapter, save)()
    if save == "save_async":
        bench.adapter.saved()
    return state


def _save_aside(bench: States) -> tuple[Any, Snapshot]:
    """Call the adapter's `save`. Then put back what the call may have changed in other state than
    weights and optimizer state. Return the result of `save`, and a snapshot of the state before the
    call.

    The state is put back: `save_and_go_on` judges a save that changes it.
    """
    before_save = bench.snapshot()
    state = _saved(bench)
    bench.put(before_save)
    return state, before_save


def _saves(bench: States) -> list[str]:
    """Return which of the methods "save" and "save_async" the adapter has, by name."""
    return [save for save in ("save", "save_async") if bench.offers(save)]


def hold_kept(bench: States) -> None:
    """Raise `Wrong` if a load in the check that has just ended lost a kind of state, such as random
    states, although a plain save and load of the adapter, which is tried here, restores that kind.

    If every load loses the kind, the check of its name reports that.
    """
    for kind, fault in bench.lost.items():
        bench.begin_in(f"keeps-{kind}")
        if attempt(_keeps(kind), bench)[0] is None:
            raise Wrong(fault)


@_check(
    "an asynchronous save, and one after it, have the run as it was, whatever steps come while one "
    "is written",
    needs=(*_SAVES, "save_async", "saved"),
    hazards=("async-save-shares-host-tensors",),
)
def async_save(bench: States) -> None:
    bench.run_through()
    adapter = bench.adapter
    bench.advance(0, 1)
    with slow_disk(bench) as disk:
        state = adapter.save_async()
        disk.returned()
        bench.follow(2, "save_async()")
    adapter.saved()
    bench.hold(2, "saved()")
    later = _saved(bench, "save_async")
    bench.load(state, cause="load() of an asynchronous save")
    bench.follow(2, "load() of an asynchronous save")
    bench.advance(5)
    bench.load(later, 2, cause="load() of a later asynchronous save")


@_check(
    "weights that are loaded alone are what the next step starts from, with the moments of before",
    needs=(*_SAVES, "load_weights"),
    hazards=("reload-misses-offloaded-copies", "weights-written-beside-optimizer"),
)
def load_weights_alone(bench: States) -> None:
    from .states import first_difference

    adapter = bench.adapter
    bench.advance(0)
    state = adapter.save()
    at_save, weights = bench.snapshot(), bench.whole_state()
    bench.advance(1)
    before, expected_beside = bench.whole_state(), bench.snapshot()
    # A main parameter that rounds to its weight already may keep its other bits.
    widened, kept = (_with_weights(before, weights, keeps=keeps) for keeps in (False, True))
    adapter.load_weights(state)
    is_kept = first_difference(kept, bench.whole_state()) is None
    expected = kept if is_kept else widened
    bench.hold_whole(expected, "load_weights()")
    biases = bench.snapshot()["expert bias"]
    if first_difference(at_save["expert bias"], biases) is None:  # they may come with the weights
        expected_beside["expert bias"] = biases
    bench.hold(expected_beside, "load_weights()", (*PUT, "counters"))
    bench.load(state, at_save, cause="load() after load_weights()")
    bench.advance(1)
    adapter.load_weights(state)
    bench.follow_as(expected, expected_beside, 2, "load_weights()")


def _with_weights(
    state: Mapping[str, Mapping[str, Any]], weights: Mapping[str, Mapping[str, Any]], *, keeps: bool
) -> dict[str, dict[str, Any]]:
    """Return a whole model's state with other weights, to which its main parameters are set as
    well. With `keeps`, elements of main parameters stay if they round to the weight.
    """
    changed = {name: dict(tensors) for name, tensors in state.items()}
    for name, tensors in changed.items():
        weight = weights[name]["weight"]
        for key in tensors.keys() & {"weight", "main", "master_param"}:
            old, new = tensors[key], weight.to(tensors[key].dtype)
            tensors[key] = new.where(old.to(weight.dtype) != weight, old) if keeps else new
    return changed


@_check(
    "a run that new processes load, in which strings have other hashes, goes on as it was saved",
    then=lambda bench: _load_later(bench),
)
def load_into_new_process(bench: States) -> None:
    import torch

    bench.run_through()
    bench.advance(0)
    _save_aside(bench)
    older = stamps(bench)
    bench.advance(1)
    state = _saved(bench)
    bench.hold_saved(state)
    snapshots = bench.gather(bench.course[1][1])
    handover = state, bench.course, bench.whole_state(), snapshots, older
    torch.save(handover, bench.folder / f"{bench.rank}-{LATER}")


def _handover_of(bench: States, rank: int) -> Any:
    """Read what rank `rank` of the first part of a check, which saved, left in a file for this
    second part, which loads.
    """
    import torch

    return torch.load(bench.folder / f"{rank}-{LATER}", weights_only=False)


def _load_later(bench: States) -> None:
    state, bench.course, *_ = _handover_of(bench, bench.rank)
    bench.load(state)
    bench.follow(2, "load() in a new process")


def _reshard(bench: States) -> None:
    """Load a checkpoint that ranks in another layout saved; raise `Wrong` unless the next step
    equals that of a model whose state was copied without any loader.
    """
    state, _, model_state, snapshots, older = _handover_of(bench, 0)
    bench.advance(0, 1)
    counters = bench.snapshot()["counters"]
    for fault, spoilt in SPOILT.items():
        _fail_to_load(bench, state, fault.replace("-", " "), spoilt, older=older)
    bench.begin_again()
    expected = bench.snapshot()
    rates, *_ = (saved["scheduler"] for saved in snapshots)
    biases = {name: bias for saved in snapshots for name, bias in saved["expert bias"].items()}
    scale = next(iter(snapshots[0]["loss scale"].values()), None)
    expected |= {
        "scheduler": {**rates, "groups": bench.groups_at(rates["groups"][0])},
        "expert bias": {name: biases[name] for name in expected["expert bias"]},
        "loss scale": dict.fromkeys(expected["loss scale"], scale),
    }
    bench.adapter.load(state)
    # A counter is as saved, or as a run in this layout has it, such as a replica's samples.
    for name, value in bench.snapshot()["counters"].items():
        allowed = [counters.get(name), *(saved["counters"].get(name) for saved in snapshots)]
        expected["counters"][name] = value if value in allowed else allowed[0]
    kinds = {"scheduler", "expert bias", "loss scale", "counters"} & {*bench.kept_kinds}
    bench.loaded(expected, "load() in this layout", sorted(kinds))
    bench.hold_whole(model_state, "load() in this layout")
    bench.follow_as(model_state, expected, 2, "load() in this layout")


for _word, _ranks in {
    "dp": "replicas",
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "ep": "expert-parallel ranks",
    "cp": "context-parallel ranks",
}.items():
    _check(
        f"a run that is loaded on another number of {_ranks} goes on as it was saved; a load there "
        "that fails raises on all ranks, and changes nothing",
        name=f"reshard-{_word}",
        then=_reshard,
        reshards=_word,
        hazards=("reshardable-state-shifted",),
    )(load_into_new_process)


def _keeps(kind: str) -> Callable[[States], None]:
    def run(bench: States) -> None:
        bench.advance(0, 1)
        saved = bench.snapshot()
        state = bench.adapter.save()
        for cause in ("load() in place", "another load() in place"):
            bench.advance(5)
            bench.adapter.load(state)
            bench.hold(saved, cause, (kind,))
        bench.begin_again()
        bench.adapter.load(state)
        bench.hold(saved, "load() into a new model", (kind,))

    return run


#: Kinds of state that layouts with a feature have.
_OF_LAYOUTS = {
    "loss scale": "loss scale",
    "expert bias": "experts",
    "auxiliary losses": "experts",
}

for _kind, _contents in {
    "scheduler": "the scheduler's steps, learning rates and weight decays",
    "random": "the random states of Python, NumPy, torch and Megatron's tracker",
    "loss scale": "the loss scale and how near it is to its next change",
    "expert bias": "the biases of routers",
    "auxiliary losses": "what trackers of auxiliary losses have summed up",
    "counters": "the framework's own counters, of iterations or samples",
}.items():
    _check(
        f"a load, once and twice, brings back {_contents}",
        name=f"keeps-{_kind.replace(' ', '-')}",
        keeps=_kind,
        where=_OF_LAYOUTS.get(_kind, ""),
        hazards=("scheduler-load-adds-steps",) if _kind == "scheduler" else (),
    )(_keeps(_kind))


@_check(
    "weights, gradients and optimizer state, moved to the host and back alone, stay as they are; "
    "in an open step too, or that is refused and the step can be taken again",
    needs=("offload", "onload", "parts"),
    hazards=("optimizer-offload-breaks-views",),
)
def offload_one_part(bench: States) -> None:
    bench.run_through()
    # Optimizer state last: there is none before the first step.
    for number, part in enumerate(sorted(bench.adapter.parts, key="optimizer".__eq__)):
        with bench.keeping(f"offload(only={part!r}) and onload()"):
            bench.memories.away_and_back(only=part)
        _follow_with_offload(bench, number, part)


def _follow_with_offload(bench: States, number: int, part: str) -> None:
    """Run a step that offloads and onloads `part`, such as "weights", before each call of the
    adapter's `microbatch` and before `finish`. Raise `Wrong` unless the step equals the undisturbed
    run's, or all ranks refuse it.
    """
    before_step = bench.snapshot()
    away_and_back = functools.partial(bench.memories.away_and_back, only=part, freeing=False)
    fault = finished = None
    try:
        finished = bench.advance(number, between=away_and_back)
    except Wrong:
        raise
    except Exception as error:  # noqa: BLE001  a refusal, in the framework's own words
        fault = first_line(error) or type(error).__name__
    cause = f"an offload of {part}"
    bench.refused(fault, f"{cause} in an open step is refused", "goes on")
    if finished is not None:
        bench.hold_step(number, f"{cause} in an open step", finished)
        return
    bench.put(before_step)  # the step has drawn from random states
    bench.hold(before_step, f"a step that was refused for {cause} in it")
    bench.follow(number, cause)


@_check(
    "an offload that fails midway, two in a row, and one after another step: all that is brought "
    "back is as it was",
    needs=("offload", "onload", "parts"),
    hazards=("optimizer-offload-breaks-views",),
)
def offload_again(bench: States) -> None:
    bench.run_through()
    for number in range(2):
        bench.advance(number)
        with bench.keeping("another offload" if number else "two offloads"):
            with no_memory(math.inf) as calls:
                bench.memories.offload()
                if number == 0:
                    bench.memories.offload(freeing=False)
            bench.memories.onload()
    _fail_to_offload(bench, len(calls) // 2, "an offload that failed midway")
    state, _ = _save_aside(bench) if bench.offers(*_SAVES) else (None, None)
    bench.follow(2, "an offload that failed midway")
    _fail_to_offload(bench, len(calls) // 2, "an offload that failed midway after a step")
    if bench.offers(*_SAVES):
        bench.load(state, cause="load() between two offloads")
        with bench.keeping("an offload after load()"):
            bench.memories.away_and_back()


def _fail_to_offload(bench: States, calls_before: int, cause: str) -> None:
    """Make an offload fail with `MemoryError` after `calls_before` tensors are copied or moved;
    raise `Wrong` unless `onload()` then restores all state. `cause` describes the failure in the
    error.
    """
    with bench.keeping(cause):
        with no_memory(calls_before):
            attempt(functools.partial(bench.memories.offload, freeing=False))
        bench.memories.onload()


@_check(
    "weights that are frozen while a run is saved or loaded, and then unfrozen, are what they were"
    "; a step leaves them, and their moments",
    hazards=("frozen-parameters-move", "frozen-parameters-refused"),
)
def saved_while_frozen(bench: States) -> None:
    from .parameters import parts
    from .states import first_difference

    bench.run_through()

    def own_parts() -> list[Any]:
        return [part for chunk in bench.model.chunks for part in parts(chunk, bench.layout)]

    trained = {part.name for part in own_parts() if part.value.requires_grad}
    names = sorted(set[str]().union(*bench.gather(trained)))[::2]

    def frozen(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parameters = [part.value for part in own_parts() if part.name in names]
        for parameter in parameters:
            parameter.requires_grad_(False)
        try:
            result = function(*args, **kwargs)
            thawed = any(parameter.requires_grad for parameter in parameters)
            bench.stop_at("a weight that was frozen is trained again" if thawed else None)
            return result
        finally:
            for parameter in parameters:
                parameter.requires_grad_(True)

    bench.advance(0)
    bench.snapshot()  # completes pending gathers
    state_before = bench.whole_state()
    frozen(bench.advance, 1)
    snapshot, state_after = bench.snapshot(), bench.whole_state()
    frozen_before, frozen_after = (
        {name: state[name] for name in names} for state in (state_before, state_after)
    )
    moved = first_difference(frozen_before, frozen_after)
    bench.stop_at(moved and f"after a step while it is frozen {moved}")
    bench.follow_as(state_after, snapshot, 2, "a step while weights were frozen")
    bench.begin_again()
    bench.advance(0, 1)
    state = frozen(bench.adapter.save)
    bench.advance(5)
    frozen(bench.load, state, cause="load() while weights are frozen")
    bench.follow(2, "load() while weights were frozen")


@_check(
    "a save, asynchronous or not, that one rank cannot write, or half of it, is known to all, and "
    "changes nothing, older files neither",
)
def failed_save(bench: States) -> None:
    bench.run_through()
    bench.advance(0)
    older, _ = _save_aside(bench)
    bench.advance(1)
    half = max((size for size, _ in saved_files(bench)), default=0) // 2
    _fail_to_save(bench, "save", 0, 0)
    _fail_to_save(bench, "save", bench.ranks - 1, half)
    if "save_async" in _saves(bench):
        _fail_to_save(bench, "save_async", bench.ranks - 1, 0)
    bench.follow(2, "a save that failed")
    for save in _saves(bench):
        state = _saved(bench, save)
        bench.load(older, 0, cause="load() of what was saved before")
        bench.load(state, 2, cause=f"load() of what {save}() saved afterwards")


def _fail_to_save(bench: States, save: str, rank: int, room: int) -> None:
    """Save while `rank` can write only `room` bytes to each file. Raise `Wrong` if some ranks raise
    and others do not, if none raises and the save cannot be loaded, or if any state changes.
    """
    adapter, is_async = bench.adapter, save == "save_async"
    yes, cannot_write = bench.rank == rank, f"rank {rank} could not write"
    with (
        bench.keeping(f"a {save}() that failed on rank {rank}") as expected,
        contextlib.ExitStack() as blocks,
    ):
        with ending_hangs(bench, f"{cannot_write}, and {save}() has not returned"):
            disk = blocks.enter_context(slow_disk(bench)) if is_async else None
            with no_room(room, yes=yes, forked=is_async):
                fault, state = attempt(getattr(adapter, save))
        has_raised = any(bench.gather(fault))
        if disk is not None and not has_raised:
            disk.returned()
            reason = f"{cannot_write}, and saved() has not returned"
            with ending_hangs(bench, reason), no_room(room, yes=yes):
                disk.release()  # threads have the limits of their process
                fault, _ = attempt(adapter.saved)
    if not bench.refused(fault, cannot_write, "takes the run for saved"):
        # The rank has nothing to write.
        bench.advance(5)
        failed_save = f"{save}() where {cannot_write}"
        with ending_hangs(
            bench, f"{failed_save} raises nothing, and load() of it has not returned"
        ):
            fault, _ = attempt(adapter.load, state)
        bench.stop_at(fault and f"{failed_save} raises nothing, and load() of it {fault}")
        bench.hold_loaded(1, f"load() after a {failed_save}")
        bench.put(expected)


def _failed_load(
    bench: States, fault: str, spoilers: Sequence[Callable[..., Any]], kinds: int
) -> None:
    """Load checkpoints with one file spoilt at a time, by each of `spoilers`, and then an intact
    one. Raise `Wrong` unless spoilt loads raise on all ranks and change nothing, and the intact
    load restores the run.
    """
    bench.run_through()
    for save in _saves(bench):
        if save != "save":
            bench.begin_in(save)
        bench.advance(0)
        _save_aside(bench)
        older = stamps(bench)
        bench.advance(1)
        state = _saved(bench, save)
        bench.advance(5)
        for spoilt in spoilers:
            _fail_to_load(bench, state, f"{fault}; saved by {save}()", spoilt, kinds, older)
        if bench.offers("load_weights"):
            _fail_to_load(bench, state, fault, spoilers[0], older=older, method="load_weights")
        failed_load = f"a load that failed ({fault}; saved by {save}())"
        bench.load(state, cause=f"{failed_load}, and one that did not")
        # From a state whose next step is known, with nothing loaded in between.
        if _fail_to_load(bench, state, f"{fault}; saved by {save}()", spoilers[0], older=older):
            bench.load(state, cause=failed_load)
        bench.follow(2, failed_load)


def _fail_to_load(
    bench: States,
    state: Any,
    fault: str,
    spoilt: Callable[..., Any],
    kinds: int = 1,
    older: Stamps = MappingProxyType({}),
    method: str = "load",
) -> bool:
    """Call the adapter's load method repeatedly, each time with another checkpoint file spoilt: the
    largest, then one of each other kind, at most `kinds` in all. Return True if any of these loads
    succeeds.

    Return whether a load has succeeded, after which steps were taken. A load may do so without the
    other kinds, and without a rank that reads nothing; one of weights alone may need none of them.
    `older` has the files of checkpoints not to load.

    Raises:
        Wrong: some ranks raised and others did not, or none did where the file is needed, or the
            state afterwards is neither the state before nor the saved state.
    """
    is_loaded = False
    for number, (_, path) in enumerate(saved_files(bench, older)[:kinds]):
        unchanged = bench.snapshot()
        with spoilt(bench, path) as spoilt_file:
            with ending_hangs(bench, f"{spoilt_file}, and {method}() has not returned"):
                raised, _ = attempt(getattr(bench.adapter, method), state)
            refusals = bench.gather(raised)
        must_fail = method == "load" and number == 0 and spoilt is not SPOILT["rank-cannot-read"]
        if None in refusals and (must_fail or any(refusals)):
            rank = refusals.index(None)
            raise Wrong(f"{spoilt_file}, and {method}() raises nothing on rank {rank}")
        name = "load" if method == "load" else f"{method}()"
        if None not in refusals:
            bench.hold(unchanged, f"a {name} that failed ({fault})", unchanged)
            continue
        cause = f"a {name} although {spoilt_file}"
        if method == "load":
            bench.hold_loaded(1, cause)
        else:
            bench.hold(1, cause, ("weights",))
        bench.advance(5)
        is_loaded = True
    return is_loaded


for _name, _fault, _kinds, *_more_spoilt in (
    ("file-missing", "a file is missing", 9),
    ("file-truncated", "a file is truncated, or empty", 9, "file-empty"),
    ("rank-cannot-read", "one rank cannot read", 1),
):
    _check(
        f"a load raises on all ranks where {_fault}, though there is an older checkpoint, and "
        "changes nothing; what was saved asynchronously too",
        name=f"failed-load-{_name}",
    )(
        functools.partial(
            _failed_load,
            fault=_fault,
            spoilers=[SPOILT[spoiler] for spoiler in (_name, *_more_spoilt)],
            kinds=_kinds,
        )
    )


EVERY: Mapping[str, Check] = MappingProxyType({**CHECKS, **STATE_CHECKS})
"""The checks of steps and of state."""
