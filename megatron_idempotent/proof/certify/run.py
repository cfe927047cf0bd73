"""Certifies an adapter: runs each check on each layout, on fresh CPU ranks."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
import logging
import re
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from megatron_idempotent.patching.settings import did_you_mean
from megatron_idempotent.patching.source import locate
from megatron_idempotent.proof.cpu import RankError, RankPool, RankTimeout
from megatron_idempotent.proof.cpu.pool import PATIENCE, PRELOAD

from .checks import CHECKS, Check
from .draws import Draw
from .faults import stuck
from .layouts import KINDS, LAYOUTS, STATE_LAYOUTS, WORDS, Layout, resharded
from .layouts import layout as named
from .protocol import SAYS, Wrong, why_not
from .state_checks import EVERY, STATE_CHECKS, hold_kept

Verdict = Literal["passed", "failed", "declared", "not offered", "not judged"]

DEADLINE_S = 60.0
"""Seconds for one check, which takes a few: a slower one has hung.

With `thorough` the deadline is four times as long, and on a busy machine up to `PATIENCE` times."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Holds the outcome of one check of an adapter on one layout.

    Example: `Result(check="whole-step", layout="dp2", verdict="passed", seconds=1.2)`.
    """

    check: str
    layout: str
    verdict: Verdict
    """`declared`: the adapter declares that the check may fail, and it failed or was not run. `not
    offered`: the adapter lacks what the check or the layout needs (a method, packs, a mean over
    sequences, equal bits), or the layout lacks what the check needs (replicas, packs, auxiliary
    losses, adapters, equal microbatches). `not judged`: `whole-step` fails on the layout."""
    seconds: float = 0.0
    of_bound: float = 0.0
    """The largest error of a step, as a part of the bound for it."""
    bits: str = ""
    """A digest of the parameters after the steps of `same-bits`."""
    fault: str = ""
    """The fault and its place in the code, in one line; for `declared` the adapter's reason."""
    seed: int = 0
    """The number that sizes and places were drawn from."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Holds the options of checks, such as the seed of their draws. Example: `Options(seed=7)`."""

    stock: bool = False
    """True without this library's patches."""
    seed: int = 0
    """The number that sizes and places are drawn from."""
    thorough: bool = False
    """True for more draws."""
    folder: str = ""
    """A folder for a check's files, such as checkpoints."""
    later: bool = False
    """True on the ranks that run `Check.then`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Says which optional methods an adapter has, and which checks it declares to fail. Example:
    `Facts(offers=frozenset({"export"}), cannot={})`.
    """

    offers: frozenset[str]
    """The optional methods that it has, its attributes that are true, and `'name' in attribute` for
    each name in its tuples of names."""
    cannot: Mapping[str, str]
    """The checks that it does not promise to pass, with the reason; "check/word" for the layouts
    with that word alone."""


_DEMANDED = ("build", "begin", "microbatch", "finish", "abort")
_FLAGS = {"packs", "sequences", "fsdp2", "order_stable"}
_OPTIONAL = _FLAGS.union(*(check.needs for check in EVERY.values()))


class Certification:
    """Runs checks of one adapter on a pool's ranks; only these ranks import the adapter.

    Example: `Certification("mine:Adapter", pool).judge("whole-step", "dp2").verdict`.
    """

    def __init__(
        self,
        adapter: str,
        pool: RankPool,
        *,
        options: Options | None = None,
        declared: bool = False,
    ) -> None:
        """Take the adapter's name, the pool and the options; no check runs before the first
        `judge`.
        """
        self._options = options or Options()
        self._adapter = adapter
        self._pool = pool
        self._declared = declared
        self._whole_steps: dict[str, Result] = {}
        self._bits: dict[str, Result] = {}

    @functools.cached_property
    def _facts(self) -> Facts:
        # This call waits for the pool's imports, so that they count for no check.
        (offer,) = self._pool.run(1, facts, self._adapter, distributed=False)
        if isinstance(offer, Facts):
            return offer
        raise ValueError(offer)

    def judge(self, check: str, layout: str) -> Result:
        """Run one check on one layout, and return its `Result`. A check of steps runs `whole-step`
        first, and is not judged if that fails.

        Raises:
            ValueError: the adapter cannot be imported, or lacks a method.
        """
        if check in CHECKS:
            if layout not in self._whole_steps:
                self._whole_steps[layout] = self._judge(CHECKS["whole-step"], named(layout))
            whole_step = self._whole_steps[layout]
            if check == "whole-step":
                return whole_step
            if whole_step.verdict == "failed":
                seed = self._options.seed
                return Result(check=check, layout=layout, verdict="not judged", seed=seed)
        return self._judge(EVERY[check], named(layout))

    def _judge(self, check: Check, layout: Layout) -> Result:
        offer = self._facts
        result = functools.partial(
            Result, check=check.name, layout=layout.name, seed=self._options.seed
        )
        needs = [*check.needs, *sorted(layout.flags & {"packs", "sequences"})]
        needs += [f"{check.keeps!r} in keeps"] if check.keeps else []
        needs += [f"{check.reshards!r} in reshards"] if check.reshards else []
        lacking = [_in_words(name) for name in needs if name not in offer.offers]
        without_mtp = layout.packs and "mtp" in layout.words and _refuses_packs_with_mtp()
        for is_refused, reason in (
            (layout.fsdp2 != ("fsdp2" in offer.offers), f"fsdp2 = {not layout.fsdp2}"),
            (lacking, f"no {', '.join(lacking)}"),
            (without_mtp, "this Megatron trains no MTP layer on packs"),
            (layout.lacks(check.where), layout.lacks(check.where)),
            (resharded(layout, check.reshards) is None, "no such layout on four ranks"),
        ):
            if is_refused:
                return result(verdict="not offered", fault=reason or "")
        excuse = why_not(offer.cannot, check.name, layout)
        if excuse is not None and not self._declared:
            return result(verdict="declared", fault=excuse)
        start = time.perf_counter()
        fault, of_bound, bits = outcome_of(self._pool, self._adapter, check, layout, self._options)
        measured: dict[str, Any] = {
            "seconds": time.perf_counter() - start,
            "of_bound": of_bound,
            "bits": bits,
        }
        if bits and not fault:
            # A layout with another number of replicas must have the same bits.
            passed = result(verdict="passed", **measured)
            first = self._bits.setdefault(alike(layout.name), passed)
            if first.bits != bits:
                fault = f"the same microbatches give other bits than in {first.layout}"
        if fault and excuse is not None:
            return result(verdict="declared", fault=f"{excuse} ({fault})", **measured)
        return result(verdict="failed" if fault else "passed", fault=fault, **measured)


def certify(
    adapter: str,
    *,
    checks: Iterable[str] | None = None,
    layouts: Iterable[str] | None = None,
    stock: bool = False,
    declared: bool = False,
    seed: int = 0,
    thorough: bool = False,
    pool: RankPool | None = None,
) -> Iterator[Result]:
    """Run checks on an adapter, and yield a result for each layout and check.

    Args:
        adapter: "package.module:Class", importable on the ranks, which have this process's path.
        checks: names of `CHECKS`, with which `whole-step` goes, and of `STATE_CHECKS`; None for all
            of the first.
        layouts: names of layouts, of the words in `layouts.WORDS`; None for all of `LAYOUTS`, or of
            `STATE_LAYOUTS` where only state is checked.
        stock: leave out the patches, which are otherwise applied on every rank.
        declared: also run the checks that the adapter's `cannot` names; their failures do not
            count. They may hang, each until its deadline.
        seed: what sizes, masks and places of failures are drawn from.
        thorough: make more draws.
        pool: ranks to run on, at least 4; None starts a pool and ends it again.

    Raises:
        ValueError: an unknown check or layout, or an adapter that cannot be imported.

    Example:
        failed = [row for row in certify("mine:Adapter") if row.verdict == "failed"]
    """
    for name, names, allowed in (
        ("checks", checks, EVERY),
        ("layouts", layouts, [*LAYOUTS, f"any of the words {', '.join(WORDS)}"]),
    ):
        if isinstance(names, str):
            raise ValueError(
                f"certify takes a list of names as {name}, got the string {names!r}: pass "
                f"[{names!r}]. Names are {', '.join(allowed)}"
            )
    check_names = _checks_in_order(CHECKS if checks is None else checks)
    usual = LAYOUTS if set(check_names) & {*CHECKS} else STATE_LAYOUTS
    layout_names = list(usual if layouts is None else dict.fromkeys(layouts))
    if not layout_names:
        raise ValueError("certify got no layouts: name one, or pass None")
    words = {EVERY[check].reshards for check in check_names}
    reached = [resharded(named(name), word) for name in layout_names for word in words]
    ranks = max(
        layout.ranks for layout in (*map(named, layout_names), *reached) if layout is not None
    )
    new_pool = None
    if pool is None:
        # Standard output is for the results; releases print there while they are imported.
        pool = new_pool = pool_of(ranks, stdout=2)
    try:
        options = Options(stock=stock, seed=seed, thorough=thorough)
        certification = Certification(adapter, pool, options=options, declared=declared)
        for layout_name in layout_names:
            for check in check_names:
                yield certification.judge(check, layout_name)
    finally:
        if new_pool is not None:
            new_pool.close()


def pool_of(ranks: int, **options: Any) -> RankPool:
    """Return a new pool of ranks that imports the modules of the checks once, for all ranks."""
    modules = (*(f"{__package__}.{name}" for name in ("adapters", "bench", "states")), __name__)
    return RankPool(ranks, preload=(*PRELOAD, *modules), **options)


def load(adapter: str) -> type:
    """Import and return an adapter's class, on a rank, because its imports may need a GPU or the
    emulation.

    Raises:
        ValueError: `adapter` is not of the form "module:Class", does not exist, or lacks a method.
    """
    module, _, name = adapter.partition(":")
    if not module or not name:
        raise ValueError(f"certify takes PACKAGE.MODULE:CLASS, got {adapter!r}")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the adapter {adapter!r} cannot be imported: {error}") from error
    missing = [name for name in _DEMANDED if not callable(getattr(kind, name, None))]
    if missing:
        raise ValueError(
            f"{adapter} has no {', '.join(missing)}(): "
            "see megatron_idempotent.proof.certify.Adapter"
        )
    for name in (*_DEMANDED, *sorted(_OPTIONAL)):
        if inspect.iscoroutinefunction(getattr(kind, name, None)):
            raise ValueError(
                f"{adapter}.{name} is an async function, which certify does not await: run the "
                "framework's coroutine in it, by asyncio.run()"
            )
    for name, allowed in SAYS.items():
        names = getattr(kind, name, ())
        if isinstance(names, str) or not set(names) <= set(allowed):
            raise ValueError(
                f"{adapter}.{name} is {names!r}: it takes a tuple of names, some of "
                f"{', '.join(map(repr, allowed))}"
            )
    unknown = []
    for declaration in getattr(kind, "cannot", {}):
        check, slash, word = declaration.partition("/")
        if check not in EVERY or (slash and word not in KINDS):
            unknown.append(declaration)
    if unknown:
        raise ValueError(
            f"{adapter}.cannot names {sorted(unknown)}, which are none of {', '.join(EVERY)}, nor "
            f"one of these before a slash and a layout's word: {', '.join(KINDS)}"
        )
    return kind  # type: ignore[no-any-return]


@functools.cache
def _refuses_packs_with_mtp() -> bool:
    """Return whether the installed Megatron refuses packs with MTP layers; 0.12 to 0.15 do."""
    path = locate("megatron.core.transformer.multi_token_prediction")
    refusal = "multi token prediction + sequence packing is not yet supported"
    return path is not None and refusal in path.read_text(encoding="utf-8")


def facts(adapter: str) -> Facts | str:
    """Return an adapter's `Facts`; if the adapter cannot be loaded, return the reason as a string.
    Called on a rank.
    """
    try:
        kind = load(adapter)
    except ValueError as error:
        return str(error)
    offers = {name for name in _OPTIONAL if getattr(kind, name, None)}
    offers |= {f"{value!r} in {name}" for name in SAYS for value in getattr(kind, name, ())}
    return Facts(offers=frozenset(offers), cannot=dict(getattr(kind, "cannot", {})))


def _in_words(need: str) -> str:
    """Return a method or attribute that a check needs, written as in the code of an adapter:
    `save()`, `packs = True`, `'dp' in reshards`.
    """
    if need in _FLAGS:
        return f"{need} = True"
    return need if " in " in need or need in SAYS else f"{need}()"


def _checks_in_order(checks: Iterable[str]) -> list[str]:
    names = list(checks)
    unknown = [name for name in names if name not in EVERY]
    if unknown or not names:
        hint = "".join(did_you_mean(name, EVERY) for name in unknown)
        raise ValueError(f"unknown check {', '.join(unknown)}: one of {', '.join(EVERY)}.{hint}")
    # If `whole-step` fails, all other checks of steps would fail, too.
    steps = [name for name in CHECKS if name == "whole-step" or name in names]
    return [*(steps if set(names) & {*CHECKS} else ()), *(n for n in STATE_CHECKS if n in names)]


def alike(layout: str) -> str:
    """Return a layout's name without the word for the number of replicas, such as "dp2"; "dp" if no
    other word is left.
    """
    return (
        "-".join(word for word in layout.split("-") if not re.fullmatch("dp[0-9]+", word)) or "dp"
    )


def outcome_of(
    pool: RankPool, adapter: str, check: Check, layout: Layout, options: Options | None = None
) -> tuple[str, float, str]:
    """Run one check of an adapter on fresh ranks of a pool: `Check.run`. If that finds no fault and
    the check has `Check.then`, run this afterwards, in another layout or in a new pool.

    Returns:
        The fault in one line, or an empty string; the largest error of a step, divided by the error
        that is allowed; and the digest of the parameters' bits, of `same-bits`.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = dataclasses.replace(options or Options(), folder=folder)
        outcome = _outcome(pool, adapter, check, layout, options)
        if check.then and not outcome[0]:
            options = dataclasses.replace(options, later=True)
            if check.reshards:
                layout = resharded(layout, check.reshards) or layout
            else:  # for this check alone: the new pool imports everything again
                pool = pool.hashing_differently()
            outcome = _outcome(pool, adapter, check, layout, options)
        return outcome


def _outcome(
    pool: RankPool, adapter: str, check: Check, layout: Layout, options: Options
) -> tuple[str, float, str]:
    deadline_s = DEADLINE_S * (4 if options.thorough else 1)
    try:
        outcomes: list[tuple[int, str, float, str]] = pool.run(
            *(layout.ranks, examine, adapter, check.name, layout.name, options),
            timeout_s=deadline_s,
            patience=PATIENCE,
            already_applied=not options.stock,
        )
    except RankTimeout as error:
        waiting = sorted(set(range(layout.ranks)) - set(error.finished))
        text = f"rank {', '.join(map(str, waiting))} did not end within {deadline_s:g} s"
        # What the others wait for is most often a rank that has raised.
        causes = sorted((*result[:2], rank) for rank, result in error.results.items() if result[1])
        details = [f"on rank {rank}: {cause}" for _, cause, rank in causes[:1]]
        details += [f"rank {rank} is {_waits(error.stacks[rank])}" for rank in waiting]
        return "; ".join((text, *details)), 0.0, ""
    except RankError as error:
        note = stuck(Path(options.folder))
        if note is not None:
            rank, reason, stacks = note
            return f"{reason}; rank {rank} is {_waits(stacks)}", 0.0, ""
        return error.failures[0].folded, 0.0, ""
    return min(outcomes)[1], max(part for _, _, part, _ in outcomes), outcomes[0][3]


def _waits(stacks: str) -> str:
    """Say where a rank waits, and in which collective, from its stacks (innermost frame first)."""
    # The thread that makes the check, if autograd or the framework has others.
    thread = next((part for part in stacks.split("\n\n") if " in examine\n" in part), stacks)
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', thread)
    # The CPU runtime wraps functions of torch.
    inside = [*itertools.takewhile(lambda f: "/torch/" in f[0] or "/proof/cpu/" in f[0], frames)]
    outside = frames[len(inside) :]
    if not outside:
        return "in no Python code"
    file, line, name = outside[0]
    collective = [n for f, _, n in inside if "/torch/distributed/" in f and n != "wrapper"][-1:]
    waiting = f"waiting in {collective[0]}(), called" if collective else ""
    return f"{waiting} in {_short(Path(file))}:{line} ({name})".lstrip()


def examine(adapter: str, check: str, layout: str, options: Options) -> tuple[int, str, float, str]:
    """Run one check of an adapter on this rank; all ranks of the layout call this function. Return
    (order, fault, error, digest).

    Returns:
        The order of the fault among those of all ranks: the one with the least order is the cause,
            and an error by which a rank learns that another one has left, or stopped the step, has
            a larger order.
        The fault in words; "" if there is none.
        The largest error of a step, divided by the error that is allowed.
        The digest of the parameters' bits, of `same-bits`; "" for other checks.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception

    import megatron_idempotent
    from megatron_idempotent.window.agreement import SessionPoisoned, WindowAborted

    from .bench import Bench
    from .faults import first_line
    from .states import States

    logging.disable(logging.WARNING)
    if not options.stock:
        megatron_idempotent.apply()
    fault, order = "", 3
    bench: Any = None
    try:
        judged = load(adapter)()
        draws: Any = {"draw": Draw(options.seed, layout, check), "thorough": options.thorough}
        definition = EVERY[check]
        if check in STATE_CHECKS:
            bench = States(judged, named(layout), folder=Path(options.folder), **draws)
            (definition.then if options.later and definition.then else definition.run)(bench)
            hold_kept(bench)
        else:
            bench = Bench(judged, named(layout), **draws)
            definition.run(bench)
    except (Exception, CheckpointException) as error:  # noqa: BLE001  the framework's doing
        fault = str(error)
        if not isinstance(error, Wrong):
            fault = f"{type(error).__name__} in {_place_of(error)}: {first_line(error)}"
        late = isinstance(error, (SessionPoisoned, WindowAborted)) or "closed by peer" in fault
        if bench is not None and bench.step_name:
            fault = f"{bench.step_name}: {fault}"
        order = 0 if isinstance(error, Wrong) else 2 if late else 1
    return order, fault, bench.of_bound if bench else 0.0, bench.bits if bench else ""


def _place_of(error: BaseException) -> str:
    """Return where an error was raised, as "file:line (function)"."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{_short(Path(frame.filename))}:{frame.lineno} ({frame.name})"


def _short(path: Path) -> str:
    parts = path.parts
    if "site-packages" in parts:
        parts = parts[parts.index("site-packages") + 1 :]
    return "/".join(parts[-4:])
