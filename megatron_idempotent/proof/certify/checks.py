"""Defines the checks: each runs steps of an adapter on all ranks, and raises `Wrong` at a fault.

Unless a check varies them, all positions count and calls are of equal size, so that few checks
catch each fault.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from .draws import CALLS, MICROBATCHES
from .failures import SPANS, Point, fail, failures, or_aborted
from .protocol import MICRO_BATCH, Calls, Finished, Rows, Wrong

if TYPE_CHECKING:
    from torch import Tensor

    from .bench import Bench

#: Rows of a call: two microbatches, as an interleaved schedule of two stages needs.
CALL = 2 * MICRO_BATCH


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Describes a check: its function, what it demands of an adapter, and what it needs to be run.

    Example: `CHECKS["split-step"].summary`.
    """

    name: str
    summary: str
    run: Callable[[Any], None]
    """Takes a `Bench`, or a check of state a `States`."""
    needs: tuple[str, ...] = ()
    """Methods of the adapter without which the check is not made, and attributes that are true."""
    hazards: tuple[str, ...] = ()
    """Hazards of Megatron that may be the cause of a failure; `megatron-idempotent explain ID`."""
    where: str = ""
    """A feature of layouts, as `Layout.lacks` takes it, without which the check is not made."""
    then: Callable[[Any], None] | None = None
    """Takes a `States` on new ranks, once those of `run` have ended."""
    reshards: str = ""
    """The layout's word whose number is another on the ranks of `then`; "" for none."""
    keeps: str = ""
    """A kind of state that the adapter must name in its `keeps`; "" for none."""


Run = TypeVar("Run", bound=Callable[..., None])


def entering(checks: dict[str, Check], **defaults: Any) -> Callable[..., Callable[[Run], Run]]:
    """Return a function `check` that makes decorators: `@check("a summary")` above a function adds
    a `Check` that runs this function to the dictionary `checks`. Its key is `name`, or else the
    function's name with hyphens.

    The decorator takes the check's summary and other fields of `Check`, for which there are
    `defaults`.
    """

    def check(summary: str, *, name: str = "", **traits: Any) -> Callable[[Run], Run]:
        def enter(run: Run) -> Run:
            own_name = name or run.__name__.replace("_", "-")
            fields = {**defaults, **traits}
            checks[own_name] = Check(name=own_name, summary=summary, run=run, **fields)
            return run

        return enter

    return check


_checks: dict[str, Check] = {}
CHECKS: Mapping[str, Check] = MappingProxyType(_checks)
"""All checks by name, in the order in which they are made."""
_check = entering(_checks)


@_check(
    "a step in one call has the gradient of its definition, and its norm",
    hazards=("grad-scale-func", "finalize-func-overwritten"),
)
def whole_step(bench: Bench) -> None:
    _steps(bench, 2 * CALL)


def _steps(bench: Bench, rows: int = CALL) -> None:
    """Run two steps, each of one call with `rows` rows, and compare each step with its reference in
    float64.
    """
    for seed in range(2):
        bench.take(bench.alike(seed, rows))


@_check("the mean is over all positions, or sequences, that count, however microbatches share them")
def counts(bench: Bench) -> None:
    def masked(replica: int) -> list[Rows]:
        # Each row counts more positions than the row before it; replicas are alike.
        rows = bench.rows(replica, 0, 2 * CALL)
        length = rows["input_ids"].shape[1]
        for index, mask_T in enumerate(rows["token_mask"]):
            mask_T[2 + index * (length - 2) // (2 * CALL) :] = 0
        rows["sample_mask"][1] = 0
        return [rows]

    def few(replica: int) -> list[Rows]:
        # One position of the first row, so that a divisor clamped from below shows.
        rows = bench.rows(replica, 0, CALL)
        rows["sample_mask"][1:] = 0
        rows["token_mask"][:, 2:] = 0
        return [rows]

    for _ in range(2):
        bench.take(masked)
    if not bench.layout.auxiliary:  # auxiliary losses would be large
        bench.take(few)


@_check(
    "sequences of a pack have other lengths than each other, and see and count only themselves",
    where="packs",
)
def packed_lengths(bench: Bench) -> None:
    for _ in range(2):
        bench.take(lambda replica: [bench.mixed(replica, 0, 2 * CALL)])


@_check(
    "a step in three calls is the step in one",
    hazards=("second-window-not-reduced", "gradient-after-reduction"),
)
def split_step(bench: Bench) -> None:
    for seed in range(2):
        bench.take(bench.alike(seed, CALL, CALL, CALL))


@_check(
    "a call's last microbatch may have fewer rows than others, or is refused and the next step is "
    "right; so for log-probs",
    where="plain",
)
def rows_left_over(bench: Bench) -> None:
    for numbers in ((2 * CALL + 1, CALL), (1, MICRO_BATCH + 1)):
        calls_of = bench.alike(bench.draw.number(1, 10**5), *bench.draw.shuffled(numbers))
        numbers_text = f"calls of {numbers[0]} and {numbers[1]} rows"
        if _refused(bench, calls_of, f"a step with {numbers_text}"):
            bench.take(bench.alike(1, CALL), cause=f"a refusal of {numbers_text}")
    if not bench.offers("logprobs") or bench.declares("logprobs-in-mid-step"):
        return
    rows, lengths_B = bench.ragged(bench.replica, bench.draw.number(1, 10**5), 2 * CALL + 1)
    try:
        logprobs = bench.adapter.logprobs(rows)
    except Exception:  # noqa: BLE001  a refusal, which is right if all ranks refuse
        logprobs = None
    if any(bench.gather(logprobs is not None)):
        bench.hold_logprobs(rows, lengths_B, logprobs)


def _refused(
    bench: Bench, calls_of: Calls, name: str, between: Callable[[], object] | None = None
) -> bool:
    """Run a step; return True if all ranks refuse it by an error, False if no rank does and the
    step is right. Raise `Wrong` if only some ranks refuse it, or if the step is wrong.

    `name` is the step's in errors, and `between` is called before each microbatch and after the
    last.
    """
    raised, finished = or_aborted(bench, calls_of(bench.replica), between=between)
    bench.step_name = name
    refusal = next(filter(None, bench.gather(raised)), None)
    is_refused = bench.refused(raised, f"it is refused on some ranks ({refusal})", "went on")
    if finished is not None:
        bench.expect(finished, calls_of)
    else:
        bench.unchanged("what was refused")
    bench.step_name = ""
    return is_refused


@_check(
    "the number of microbatches changes from step to step, up to 100; sums and counts keep what "
    "each adds",
    hazards=("deferred-reduction-refused",),
)
def sizes_change(bench: Bench) -> None:
    bench.take((_many_alike if bench.layout.dtype == "bf16" else _many_counted)(bench))
    for seed, factor in enumerate((1, 3)):
        bench.take(bench.alike(seed, factor * CALL))


def _many_counted(bench: Bench) -> Calls:
    """Return the rows of a step in which more than 2,048 positions count, so that a count kept in
    float16 would be wrong.

    float16 has no odd numbers above 2,048: a count in it does not grow by ones, and an odd sum is
    rounded. That changes the gradient by 1 / 2,200, which is above the bound of float64.
    """
    replicas, by_sequence = bench.layout.replicas, bench.layout.loss_kind == "sequence"

    def calls(replica: int) -> list[Rows]:
        many = bench.rows(replica, 70, MICRO_BATCH)
        positions = int(many["token_mask"][:, 1:].sum())
        number = -(-2048 // (positions * replicas))
        number = -(-number // bench.multiple) * bench.multiple
        many = bench.rows(replica, 70, MICRO_BATCH * number)
        single = bench.rows(replica, 71, MICRO_BATCH * 12)
        single["token_mask"][:, 2:] = 0
        if not by_sequence:  # there each sequence needs a position that counts
            single["sample_mask"][1::MICRO_BATCH] = 0
        if replica == 0:
            single["token_mask"][0, 2] = 1  # so that their sum is odd
        return [many, single]

    return calls


def _many_alike(bench: Bench) -> Calls:
    """Return the rows of a step that repeats one microbatch at least 81 times. The first microbatch
    has a loss 512 times as large as each other one, so that a sum in bfloat16 would lose the
    others.

    Each of the others is less than half of the last bit of a sum in bfloat16 that begins with the
    first: it would be lost. All others are 13.5 % of the gradient, above the bounds of bfloat16.
    """
    import torch

    def calls(replica: int) -> list[Rows]:
        rows = bench.rows(replica, 72, MICRO_BATCH)
        number = -(-81 // bench.multiple) * bench.multiple
        many = {name: torch.cat([value] * number) for name, value in rows.items()}
        many["scale"][:] = 0.125
        many["scale"][:MICRO_BATCH] = 64.0
        return [many]

    return calls


def _by_replica(bench: Bench, seed: int, numbers: Sequence[int]) -> Calls:
    return lambda replica: [bench.rows(replica, seed, numbers[(replica + seed) % len(numbers)])]


@_check("replicas have different numbers of microbatches", where="replicas")
def uneven_replicas(bench: Bench) -> None:
    for seed in range(2):
        bench.take(_by_replica(bench, seed, (CALL, 2 * CALL)))


@_check("a replica has no rows in a step", where="replicas")
def replica_without_rows(bench: Bench) -> None:
    for seed in range(2):
        bench.take(_by_replica(bench, seed, (0, CALL)))


@_check(
    "steps of drawn sizes are right: up to 7 calls of up to 9 microbatches, odd, empty, uneven",
    hazards=("deferred-reduction-refused", "second-window-not-reduced"),
)
def drawn_sizes(bench: Bench) -> None:
    for _ in range(4 if bench.thorough else 1):
        # Calls without rows: the first or last, and one in between; then a full step.
        first, last = bench.draw.shuffled((0, -1))
        bench.take(_drawn(bench, bench.draw.number(2, 3), empty=(first,)))
        calls = bench.draw.shuffled((4, 6))[0]  # CALLS is odd
        bench.take(_drawn(bench, calls, empty=(last, bench.draw.number(1, calls - 2))))
        bench.take(_drawn(bench, CALLS))
    if not (bench.half or bench.layout.auxiliary):
        # So large a gradient shows clipping. The step spoils the model, so it is the last.
        bench.take(_drawn(bench, 2, size=2.0**12))


def _drawn(bench: Bench, calls: int, *, empty: Sequence[int] = (), size: float = 1.0) -> Calls:
    """Draw the rows of a random step of `calls` calls. Replicas have different numbers of
    microbatches, unless the adapter declares that it cannot train so.

    The calls in `empty` have no rows, on some replicas or all. `size` is that of the rows' scales.
    """
    draw, replicas = bench.draw, range(bench.layout.replicas)
    sizes_of = [draw.sizes(calls, bench.multiple) for _ in replicas]
    if not bench.declares("replica-without-rows"):
        for call in empty:
            for sizes in sizes_of[draw.number(0, len(replicas) - 1) :]:  # of some, or of all
                sizes[call] = 0
    if bench.declares("uneven-replicas"):
        sizes_of = [sizes_of[-1]] * len(replicas)
    seeds = [draw.number(1, 10**6) for _ in range(calls)]
    # Calls of few and of many positions: the mean of the calls' means differs from the mean.
    shares_of = [
        [draw.share(*bounds) for bounds in draw.dealt(((0.03, 0.2), (0.8, 1.0)), calls)]
        for _ in replicas
    ]
    return lambda replica: [
        bench.sparse(replica, seed, MICRO_BATCH * number, share, size=size)
        for seed, number, share in zip(seeds, sizes_of[replica], shares_of[replica], strict=True)
    ]


@_check("where nothing of a microbatch, a call, a replica or a step counts, nothing becomes NaN")
def nothing_valid(bench: Bench) -> None:
    size = MICRO_BATCH * bench.multiple

    def masked(empty: Callable[[int, int], slice], seed: int) -> Calls:
        def calls(replica: int) -> list[Rows]:
            rows_of_calls = bench.alike(seed, 2 * size, 2 * size)(replica)
            for call, rows in enumerate(rows_of_calls):
                # Frameworks differ in whether a sequence without counting positions counts.
                name = "token_mask" if seed % 2 and not by_sequence else "sample_mask"
                rows[name][empty(replica, call)] = 0
            return rows_of_calls

        return calls

    by_sequence = bench.layout.loss_kind == "sequence"
    no_rows, all_rows, half_of_rows = slice(0), slice(None), slice(size)
    masks: list[Callable[[int, int], slice]] = [
        lambda replica, call: (no_rows, half_of_rows)[call],
        lambda replica, call: (all_rows, no_rows)[call],
    ]
    if bench.layout.replicas > 1:
        masks.append(lambda replica, call: no_rows if replica else all_rows)
    if not bench.layout.auxiliary:  # their sum would be divided by zero positions
        masks += [lambda replica, call: all_rows] * 2
    start = bench.draw.number(1, 10**5)
    for seed, empty in enumerate([*bench.draw.shuffled(masks), masks[0]], start):
        bench.take(masked(empty, seed))


@_check(
    "steps are right if nobody looks at the parameters before the last of them is done",
    hazards=("params-stale-after-step", "pending-gather-dropped"),
)
def unwatched_steps(bench: Bench) -> None:
    draw = bench.draw
    steps = []
    # A fault in every twelfth step shows in the step after it.
    for seed in range(26 if bench.thorough else 14):
        sizes = (
            draw.sizes(draw.number(1, 3), bench.multiple, most=2) if seed < 5 else [bench.multiple]
        )
        steps.append(bench.alike(seed, *(MICRO_BATCH * size for size in sizes)))
    if not (bench.half or bench.layout.auxiliary):
        # A spike, which a guard that compares with earlier norms would skip or clip.
        steps.append(_drawn(bench, 1, size=2.0**12))
    bench.unwatched(steps)


@_check(
    "auxiliary losses count by the tokens, or sequences, of their microbatches, in any calls",
    hazards=("chained-calls-weigh-losses", "aux-loss-scale-left-set"),
    where="auxiliary",
)
def auxiliary_losses(bench: Bench) -> None:
    def calls(replica: int) -> list[Rows]:
        # Calls of unequal sizes, whose microbatches count unequal shares of positions.
        small, large = bench.alike(30, CALL, 3 * CALL)(replica)
        large["token_mask"][:CALL, large["input_ids"].shape[1] // 2 :] = 0
        return [small, large]

    for _ in range(2):
        bench.take(calls)


@_check(
    "log-probs before and after a microbatch are right, and change nothing",
    needs=("logprobs",),
    hazards=("offload-plan-mislearned",),
)
def logprobs_in_mid_step(bench: Bench) -> None:
    adapter = bench.adapter
    first, second = (bench.alike(seed, CALL) for seed in range(2))
    # Each pass of log-probs reads new rows, equally many within a step, and many in one step.
    many = MICROBATCHES // bench.multiple * bench.multiple
    first_size, second_size = bench.draw.shuffled(
        (many, bench.draw.sizes(1, bench.multiple, most=5)[0])
    )
    looks: list[tuple[Rows, Tensor]] = []
    finished = bench.step(first, between=lambda: looks.append(_hold_logprobs(bench, first_size)))
    # The same rows just before the update and just after it, before parameters are gathered.
    rows, lengths_B = looks[-1]
    logprobs_BT = adapter.logprobs(rows)
    bench.expect(finished, first)
    bench.hold_logprobs(rows, lengths_B, logprobs_BT)
    # Other rows in the same tensors, as a data loader's buffers are refilled.
    other_rows, lengths_B = _some(bench, first_size)
    for name, value in other_rows.items():
        rows[name].copy_(value)
    bench.hold_logprobs(rows, lengths_B, adapter.logprobs(rows))
    bench.take(second, between=functools.partial(_hold_logprobs, bench, second_size))


def _hold_logprobs(bench: Bench, microbatches: int = 2) -> tuple[Rows, Tensor]:
    """Draw random rows; raise `Wrong` unless the adapter's log-probs of the rows are right. Return
    the rows and their lengths.
    """
    rows, lengths_B = _some(bench, microbatches)
    bench.hold_logprobs(rows, lengths_B, bench.adapter.logprobs(rows))
    return rows, lengths_B


def _some(bench: Bench, microbatches: int) -> tuple[Rows, Tensor]:
    """Draw random rows of this replica for `microbatches` microbatches; return the rows and their
    lengths [B].
    """
    return bench.ragged(bench.replica, bench.draw.number(1, 10**5), MICRO_BATCH * microbatches)


@_check(
    "an export in an open step has the model's values, and changes nothing",
    needs=("export",),
    hazards=("params-stale-after-step", "pending-gather-dropped"),
)
def export_in_mid_step(bench: Bench) -> None:
    first, second = (bench.alike(seed, CALL) for seed in range(2))
    unseen: list[Finished] = []

    def export() -> None:
        exported = bench.adapter.export()
        if unseen:  # the export came before anything else read the step's parameters
            bench.expect(unseen.pop(), first)
        bench.unchanged("a step that has not finished")
        bench.hold_export(exported)

    unseen_after = bench.step(first, between=export)
    unseen.append(unseen_after)
    bench.take(second, between=export)


@_check("after an abort nothing is left of the step", hazards=("first-window-aborted",))
def abort_and_retry(bench: Bench) -> None:
    adapter = bench.adapter
    _steps(bench)
    for calls in (0, 1, bench.draw.number(2, CALLS)):
        adapter.begin()
        for call, size in enumerate(bench.draw.sizes(calls, bench.multiple, most=3)):
            adapter.microbatch(bench.rows(bench.replica, 50 + call, MICRO_BATCH * size))
        adapter.abort()
        bench.unchanged("abort()")
        bench.take(bench.alike(60 + calls, CALL), cause=f"an abort() in call {calls}")


@_check(
    "a failure on one rank, in any call and microbatch, stops all, and the next step is right",
    hazards=("first-window-aborted",),
)
def failure_on_one_rank(bench: Bench) -> None:
    for failure in failures(bench):
        fail(bench, failure)
        calls_of = bench.alike(bench.draw.number(1, 10**5), CALL)
        failed_step = f"one in which {failure}"
        if issubclass(failure.error, Exception):
            bench.take(calls_of, cause=failed_step)
        else:  # the process was told to end, and may refuse further steps
            _refused(bench, calls_of, f"the step after {failed_step}")


@_check(
    "no rank updates with a NaN or an infinite loss in any call and replica, or a gradient that is "
    "NaN, and the next step is right"
)
def nan(bench: Bench) -> None:
    draw, times = bench.draw, 3 if bench.thorough else 1
    # On each replica in the first call, in one of few and in one of many; in any microbatch.
    spots = draw.shuffled([*itertools.product(range(bench.layout.replicas), SPANS)] * times)
    kinds = draw.dealt((math.nan, math.inf, None), len(spots))
    for (replica, span), number in zip(spots, kinds, strict=True):
        event = _not_finite(bench, replica, Point.drawn(bench, span), number)
        bench.take(bench.alike(draw.number(1, 10**5), CALL), cause=f"one in which {event}")


def _not_finite(bench: Bench, replica: int, point: Point, number: float | None) -> str:
    """Run a step with a loss or gradient that is not finite; raise `Wrong` if a rank updates its
    parameters, or if only some of the ranks raise. Return in words what was not finite.

    The loss of a row of the replica is multiplied by `number`. If that is None, the loss stays as
    it is, and a gradient is NaN on one rank of the replica.
    """
    draw, call = bench.draw, point.call
    seed = draw.number(1, 10**5)
    calls_of = bench.alike(seed, *(MICRO_BATCH * size for size in point.sizes))
    # In later calls not in the first microbatch, which may be the only one that is checked.
    row = draw.number(MICRO_BATCH if call else 0, MICRO_BATCH * point.sizes[call] - 1)
    coordinates = enumerate(bench.gather(bench.coordinates))
    ranks = [rank for rank, (rank_replica, *_) in coordinates if rank_replica == replica]
    rank = draw.shuffled(ranks)[0]
    forwards_done = None
    if number is None and bench.rank == rank:
        forwards_done = sum(point.sizes[:call]) + point.microbatch
    rows_of_calls = calls_of(bench.replica)
    if bench.replica == replica and number is not None:
        rows_of_calls[call]["scale"][row] = number
    with bench.forwards.failing(forwards_done, "gradient"):
        raised, finished = or_aborted(bench, rows_of_calls)
    if number is not None:
        event = f"a loss of replica {replica} is {number}, {point}"
    elif not any(bench.gather(bench.forwards.has_failed)):
        # The adapter runs fewer microbatches, or does not call the chunk's forward.
        if finished is not None:
            bench.expect(finished, calls_of)
        return "nothing was NaN"
    else:
        event = f"a gradient is NaN on rank {rank}, of a finite loss, {point}"
    outcomes = bench.gather((raised, finished is not None and finished.updated))
    if any(updated for _, updated in outcomes):
        raise Wrong(f"{event}, and the step updated all the same")
    if len({error is None for error, _ in outcomes}) > 1:
        raise Wrong(f"{event}, and some ranks raised while others went on")
    bench.unchanged(f"a step in which {event}")
    return event


@_check(
    "a second run over the same model is right",
    hazards=("no-sync-func-reentry", "second-window-not-reduced"),
)
def second_run(bench: Bench) -> None:
    for _ in range(2):
        _steps(bench)
        bench.adapter.build(bench.subject)
    _steps(bench)


@_check("a run that continues from a checkpoint takes the same steps", needs=("save", "load"))
def resume(bench: Bench) -> None:
    from .bench import names_moved

    adapter = bench.adapter
    _steps(bench)
    state = adapter.save()
    saved, update = bench.parameters, copy.deepcopy(bench.update)
    bench.take(bench.alike(2, CALL), cause="save()")
    later = bench.parameters
    bench.set_up()
    adapter.load(state)
    if not names_moved(bench.gather_parameters(), later):
        raise Wrong(
            "save() returns tensors that the next step has written to: the adapter has to return "
            "copies, or to write them before it returns"
        )
    bench.parameters, bench.update = saved, update
    bench.unchanged("save() and load()")
    _steps(bench)


@_check(
    "steps go on as before after offloads, which free memory or move what is in it",
    needs=("offload", "onload"),
    hazards=("optimizer-offload-breaks-views", "zero-grad-while-offloaded"),
)
def offload_between_steps(bench: Bench) -> None:
    for seed in range(3):  # the first one before there is optimizer state
        bench.away_and_back()
        bench.take(bench.alike(seed, CALL), cause="an offload() and onload()")


@_check(
    "log-probs are right while only parameters are back from an offload, and change nothing",
    needs=("offload", "onload", "logprobs"),
    hazards=("zero-grad-while-offloaded", "offload-plan-mislearned"),
)
def logprobs_while_offloaded(bench: Bench) -> None:
    def read() -> None:
        bench.memories.offload()
        bench.memories.onload(training=False)
        _hold_logprobs(bench)

    read()
    bench.memories.onload()  # what log-probs do not read
    bench.unchanged("onload(training=False) and onload()")
    bench.take(bench.alike(0, CALL), cause="log-probs while offloaded")
    read()
    bench.away_and_back(freeing=False)


@_check(
    "an offload in an open step keeps its gradients, or is refused and the next step is right",
    needs=("offload", "onload"),
    hazards=("offload-drops-gradients",),
)
def offload_in_mid_step(bench: Bench) -> None:
    calls = bench.alike(0, CALL)
    exchange = functools.partial(bench.memories.away_and_back, freeing=False)
    if _refused(bench, calls, "a step with an offload in it", exchange):
        bench.take(bench.alike(1, CALL), cause="an offload in an open step, which was refused")


@_check(
    "factors of low-rank adapters over a frozen base have their gradients, some frozen in between; "
    "log-probs are those of merged weights",
    where="megatron",
    hazards=("frozen-parameters-move", "frozen-parameters-refused"),
)
def low_rank_adapters(bench: Bench) -> None:
    from .low_rank import LowRank

    kinds: list[dict[str, Any]] = [
        {"rank": 1, "magnitudes": False},
        {"rank": 16, "magnitudes": True},
    ]
    if bench.layout.dtype in ("bf16", "fp16") and not hasattr(bench.adapter, "low_rank"):
        kinds.append({"rank": 4, "wide": True})
    for kind in kinds:
        adapted = LowRank(bench, **kind)
        for seed, frozen in enumerate(((), ("linear_in",), ("linear_out",), ())):
            adapted.freeze(*frozen)
            adapted.take(adapted.alike(seed, CALL))
        if adapted.offers("logprobs") and not bench.declares("logprobs-in-mid-step"):
            _hold_logprobs(adapted)


@_check(
    "the same microbatches give the same bits on any number of replicas, in any order and calls",
    needs=("order_stable",),
    where="rows",
)
def same_bits(bench: Bench) -> None:
    # A number that one, two, three and four replicas can share.
    all_rows = bench.rows(0, 90, 12 * MICRO_BATCH)

    def digest_of(on: Bench, order: Sequence[int], *, calls: int) -> str:
        def calls_of(replica: int) -> list[Rows]:
            per_replica = len(order) // on.layout.replicas
            own_rows = [
                MICRO_BATCH * index + row
                for index in order[replica * per_replica :][:per_replica]
                for row in range(MICRO_BATCH)
            ]
            # An interleaved schedule takes calls of an even number of microbatches.
            cut = MICRO_BATCH * (2 * per_replica // 3 if calls == 2 else per_replica)
            parts = [own_rows[:cut], own_rows[cut:]][:calls]
            return [{name: value[part] for name, value in all_rows.items()} for part in parts]

        for _ in range(2):
            on.take(calls_of)
        return on.digest()

    bench.bits = digest_of(bench, range(12), calls=1)
    second_bench = type(bench)(type(bench.adapter)(), bench.layout)
    if digest_of(second_bench, range(11, -1, -1), calls=2) != bench.bits:
        raise Wrong("the same microbatches in another order and two calls give other bits")
