"""Defines the checks: each runs steps of an adapter on all ranks, and raises `Wrong` at a fault.

Where a check is silent about it, all positions count, and calls are of equal size, so that each
fault is caught by few checks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .protocol import MICRO_BATCH, Calls, Finished, Rows, Wrong

if TYPE_CHECKING:
    from .bench import Bench

#: Rows of a call: two microbatches, or as many as an interleaved schedule asks for.
CALL = 2 * MICRO_BATCH


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Names a check and says what it demands.

    Example: `CHECKS["split-step"].summary`.
    """

    name: str
    summary: str
    run: Callable[[Bench], None]
    needs: tuple[str, ...] = ()
    """Methods of the adapter without which the check is not made."""
    hazards: tuple[str, ...] = ()
    """Hazards of Megatron that may be the cause of a failure; `megatron-idempotent explain ID`."""
    replicas: bool = False
    """True if it takes more than one data-parallel rank."""
    auxiliary: bool = False
    """True if it takes a model whose layers add losses of their own."""
    packs: bool = False
    """True if it takes a layout of packs."""
    adapters: bool = False
    """True if it takes a layout in which several adapters can be judged over one base."""
    bits: bool = False
    """True if it takes an adapter that says `order_stable = True`, and compares bits of layouts."""


_checks: dict[str, Check] = {}
CHECKS: Mapping[str, Check] = MappingProxyType(_checks)
"""All checks by name, in the order in which they are made."""


def _check(
    summary: str,
    *,
    needs: tuple[str, ...] = (),
    hazards: tuple[str, ...] = (),
    replicas: bool = False,
    auxiliary: bool = False,
    packs: bool = False,
    adapters: bool = False,
    bits: bool = False,
) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Put a function among the checks, under its own name."""

    def enter(run: Callable[[Bench], None]) -> Callable[[Bench], None]:
        name = run.__name__.replace("_", "-")
        _checks[name] = Check(
            name=name,
            summary=summary,
            run=run,
            needs=needs,
            hazards=hazards,
            replicas=replicas,
            auxiliary=auxiliary,
            packs=packs,
            adapters=adapters,
            bits=bits,
        )
        return run

    return enter


def _of(bench: Bench, seed: int, *numbers: int) -> Calls:
    """Make a call of so many rows for each number, the same numbers in all replicas."""
    return lambda replica: [
        bench.rows(replica, 10 * seed + call, number) for call, number in enumerate(numbers)
    ]


@_check(
    "a step in one call has the gradient of its definition, and its norm",
    hazards=("grad-scale-func", "finalize-func-overwritten"),
)
def whole_step(bench: Bench) -> None:
    for seed in range(2):
        bench.take(_of(bench, seed, 2 * CALL))


@_check("the mean is over all positions, or sequences, that count, however microbatches share them")
def counts(bench: Bench) -> None:
    def masked(replica: int) -> list[Rows]:
        # Each row counts more positions than the one before, and replicas as many as each other.
        rows = bench.rows(replica, 0, 2 * CALL)
        length = rows["input_ids"].shape[1]
        for index, mask_T in enumerate(rows["token_mask"]):
            mask_T[2 + index * (length - 2) // (2 * CALL) :] = 0
        rows["sample_mask"][1] = 0
        return [rows]

    for _ in range(2):
        bench.take(masked)


@_check(
    "sequences of a pack have other lengths than each other, and see and count only themselves",
    packs=True,
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
        bench.take(_of(bench, seed, CALL, CALL, CALL))


@_check(
    "the number of microbatches changes from step to step",
    hazards=("deferred-reduction-refused",),
)
def sizes_change(bench: Bench) -> None:
    for seed, factor in enumerate((2, 1, 3)):
        bench.take(_of(bench, seed, factor * CALL))


def _by_replica(bench: Bench, seed: int, numbers: Sequence[int]) -> Calls:
    return lambda replica: [bench.rows(replica, seed, numbers[(replica + seed) % len(numbers)])]


@_check(
    "replicas have different numbers of microbatches",
    replicas=True,
)
def uneven_replicas(bench: Bench) -> None:
    for seed in range(2):
        bench.take(_by_replica(bench, seed, (CALL, 2 * CALL)))


@_check(
    "a replica has no rows in a step",
    replicas=True,
)
def replica_without_rows(bench: Bench) -> None:
    for seed in range(2):
        bench.take(_by_replica(bench, seed, (0, CALL)))


@_check(
    "auxiliary losses count by the tokens, or sequences, of their microbatches, in any calls",
    hazards=("chained-calls-weigh-losses", "aux-loss-scale-left-set"),
    auxiliary=True,
)
def auxiliary_losses(bench: Bench) -> None:
    def calls(replica: int) -> list[Rows]:
        # Calls of other sizes, whose microbatches count other shares of their positions.
        small, large = _of(bench, 30, CALL, 3 * CALL)(replica)
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
    for seed in range(2):
        bench.take(_of(bench, seed, CALL), between=lambda: _hold_logprobs(bench))


def _hold_logprobs(bench: Bench) -> None:
    """Raises `Wrong` unless the adapter's log-probs of some rows are right."""
    adapter: Any = bench.adapter
    rows = bench.rows(bench.replica, 70, CALL)
    found = adapter.logprobs(rows)
    if found is None:  # not on the last stage
        return
    right_N, found_N = (bench.predicted(rows, each) for each in (bench.logprobs(rows), found))
    error = float((found_N - right_N).norm() / right_N.norm())
    if not error <= bench.roundings:
        raise Wrong(f"log-probs differ from the model's by {100 * error:.3g} % of their norm")


@_check(
    "an export in an open step changes nothing",
    needs=("export",),
    hazards=("params-stale-after-step", "pending-gather-dropped"),
)
def export_in_mid_step(bench: Bench) -> None:
    adapter: Any = bench.adapter

    def export() -> None:
        adapter.export()
        bench.unchanged("a step that has not finished")

    for seed in range(2):
        bench.take(_of(bench, seed, CALL), between=export)


@_check(
    "after an abort nothing is left of the step",
    hazards=("first-window-aborted",),
)
def abort_and_retry(bench: Bench) -> None:
    adapter = bench.adapter
    whole_step(bench)
    for calls in range(2):
        adapter.begin()
        for call in range(calls):
            adapter.microbatch(bench.rows(bench.replica, 50 + call, CALL))
        adapter.abort()
        bench.unchanged("abort()")
        bench.take(_of(bench, 60 + calls, 2 * CALL))


def _or_aborted(bench: Bench, step: Callable[[], Finished]) -> tuple[str | None, Finished | None]:
    """Returns what a step raised on this rank, which then aborts it, or what it returned."""
    from megatron_idempotent.ranks.agreement import describe

    try:
        return None, step()
    except Wrong:
        bench.adapter.abort()
        raise
    except Exception as error:  # noqa: BLE001  it is what is asked for
        bench.adapter.abort()
        return describe(error).splitlines()[0], None


@_check(
    "a loss that raises on one rank stops all, and the next step is right",
    hazards=("first-window-aborted",),
)
def failure_on_one_rank(bench: Bench) -> None:
    adapter = bench.adapter
    last = bench.ranks - 1  # on the last stage, which computes the loss

    def step() -> Finished:
        adapter.begin()
        adapter.microbatch(bench.rows(bench.replica, 0, CALL), fail=bench.rank == last)
        return adapter.finish()

    raised, _ = _or_aborted(bench, step)
    told = bench.told_by_all(raised)
    calm = [rank for rank, each in enumerate(told) if each is None]
    if calm:
        raise Wrong(
            f"the loss of rank {last} failed ({told[last]}), and rank {calm[0]} finished the step"
        )
    bench.unchanged("a step that failed")
    bench.take(_of(bench, 1, CALL))


@_check("no rank updates with a NaN, and the next step is right")
def nan(bench: Bench) -> None:
    adapter = bench.adapter

    def step() -> Finished:
        rows = bench.rows(bench.replica, 0, CALL)
        if bench.replica == 0:
            rows["scale"][0] = math.nan
        adapter.begin()
        adapter.microbatch(rows)
        return adapter.finish()

    raised, finished = _or_aborted(bench, step)
    told = bench.told_by_all((raised, finished is not None and finished.updated))
    if any(updated for _, updated in told):
        raise Wrong("a loss of one replica is NaN, and the step updated all the same")
    if len({error is None for error, _ in told}) > 1:
        raise Wrong("a loss of one replica is NaN, and some ranks raised while others went on")
    bench.unchanged("a step with a NaN")
    bench.take(_of(bench, 1, CALL))


@_check(
    "a second run over the same model is right",
    hazards=("no-sync-func-reentry", "second-window-not-reduced"),
)
def second_run(bench: Bench) -> None:
    for _ in range(2):
        whole_step(bench)
        bench.adapter.build(bench.subject)
    whole_step(bench)


@_check(
    "a run that continues from a checkpoint takes the same steps",
    needs=("save", "load"),
)
def resume(bench: Bench) -> None:
    adapter: Any = bench.adapter
    whole_step(bench)
    state = adapter.save()
    bench.make_model()
    adapter.build(bench.subject)
    adapter.load(state)
    bench.unchanged("save() and load()")
    whole_step(bench)


@_check(
    "steps go on as before after offloads, which free memory or move what is in it",
    needs=("offload", "onload"),
    hazards=("optimizer-offload-breaks-views", "zero-grad-while-offloaded"),
)
def offload_between_steps(bench: Bench) -> None:
    for seed in range(3):  # the first before there is any optimizer state
        bench.away_and_back()
        bench.take(_of(bench, seed, CALL))


@_check(
    "log-probs are right while only parameters are back from an offload, and change nothing",
    needs=("offload", "onload", "logprobs"),
    hazards=("zero-grad-while-offloaded", "offload-plan-mislearned"),
)
def logprobs_while_offloaded(bench: Bench) -> None:
    def read() -> None:
        bench.memories.offload(bench.adapter)
        bench.memories.onload(bench.adapter, training=False)
        _hold_logprobs(bench)
        bench.away_and_back(freeing=False)

    read()
    bench.take(_of(bench, 0, CALL))
    read()


@_check(
    "an offload in an open step keeps its gradients, or is refused and the next step is right",
    needs=("offload", "onload"),
    hazards=("offload-drops-gradients",),
)
def offload_in_mid_step(bench: Bench) -> None:
    calls = _of(bench, 0, CALL)

    def exchange() -> None:
        bench.memories.offload(bench.adapter, freeing=False)
        bench.memories.onload(bench.adapter)

    def step() -> Finished:
        bench.adapter.begin()
        for rows in calls(bench.replica):
            exchange()
            bench.adapter.microbatch(rows)
        exchange()
        return bench.adapter.finish()

    raised, finished = _or_aborted(bench, step)
    told = bench.told_by_all(raised)
    if finished is not None and not any(told):
        bench.expect(finished, [row for one in range(bench.layout.replicas) for row in calls(one)])
        return
    if not all(told):
        raise Wrong("an offload in an open step is refused on some ranks, and others went on")
    bench.unchanged("a step that was refused")
    bench.take(_of(bench, 1, CALL))


@_check(
    "two adapters over one base are trained in turn, and by steps that are open together",
    needs=("tenant",),
    adapters=True,
)
def swapped_adapters(bench: Bench) -> None:
    from .tenants import Base, Tenant

    names = "alice", "bob"
    base = Base(bench, names)
    alice, bob = pair = [Tenant(bench, base, name) for name in names]
    calls = {each: _of(bench, seed, CALL, CALL) for seed, each in enumerate(pair)}
    for each in (alice, bob, alice):  # one after the other
        each.take(calls[each])
    bob.unchanged("a step of alice")
    try:
        for each in pair:
            each.begin(calls[each])
        for each in pair * 2:
            each.microbatch()
        for each in pair:
            each.finish()
        for each in reversed(pair):  # of which one is dropped
            each.begin(calls[each])
            each.microbatch()
        bob.abort()
        alice.microbatch()
        alice.finish()
        bob.unchanged("abort()")
        bob.take(calls[bob])
    except Exception:
        for each in pair:
            each.abort()
        raise


@_check(
    "the same microbatches give the same bits on any number of replicas, in any order and calls",
    bits=True,
)
def same_bits(bench: Bench) -> None:
    # As many as one, two, three and four replicas share.
    whole = bench.rows(0, 90, 12 * MICRO_BATCH)

    def taken(on: Bench, order: Sequence[int], *, calls: int) -> str:
        def calls_of(replica: int) -> list[Rows]:
            each = len(order) // on.layout.replicas
            mine = [
                MICRO_BATCH * index + row
                for index in order[replica * each :][:each]
                for row in range(MICRO_BATCH)
            ]
            # An interleaved schedule takes calls of an even number of microbatches.
            cut = MICRO_BATCH * (2 * each // 3 if calls == 2 else each)
            parts = [mine[:cut], mine[cut:]][:calls]
            return [{name: value[part] for name, value in whole.items()} for part in parts]

        for _ in range(2):
            on.take(calls_of)
        return on.digest()

    bench.bits = taken(bench, range(12), calls=1)
    again = type(bench)(type(bench.adapter)(), bench.layout)
    if taken(again, range(11, -1, -1), calls=2) != bench.bits:
        raise Wrong("the same microbatches in another order and two calls give other bits")
