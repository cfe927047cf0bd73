"""Programs of schedule calls and reductions, and what to say of their outcomes.

A program is a setting of Megatron's DDP and a sequence of operations; `reductions.py` runs them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

#: Layouts that a small net has no use for: ranks, and options of `cpu.tiny.build`.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (4, {"pp": 2}),
    "vpp2": (4, {"pp": 2, "vpp": 2}),
    "vpp2-align": (4, {"pp": 2, "vpp": 2, "align": True}),
    "ep2": (2, {"ep": 2, "experts": 4}),
    "tp2-sp": (4, {"tp": 2, "sequence_parallel": True}),
}


class Setting(NamedTuple):
    """Settings of DDP, and the model that it wraps."""

    overlap: bool = True
    distributed: bool = True
    wired: bool = True
    """True if `config.no_sync_func` is set."""
    instances: int = 1
    net: str = "dense"
    """`dense`; `experts`, some parameters in buffers of their own; `twice`, a layer that is
    recomputed and used twice, which registers twice; or a layout."""

    def __str__(self) -> str:
        return "-".join(
            [
                self.net,
                "overlap" if self.overlap else "plain",
                "scatter" if self.distributed else "reduce",
                "wired" if self.wired else "bare",
                *([f"{self.instances}x"] if self.instances > 1 else []),
            ]
        )


class Program(NamedTuple):
    """`ops` are methods of `Run` and their arguments."""

    name: str
    setting: Setting
    ops: tuple[tuple[Any, ...], ...]

    @property
    def uses(self) -> int:
        return sum(op == ("use",) for op in self.ops)


class Result(NamedTuple):
    """Results of a program on one rank."""

    uses: list[tuple[bool, str]]
    """True at each use where the gradients were right, with a digest of their bits."""
    error: str | None
    """`Type: message` of what ended it early."""


#: Microbatches of the schedule calls of each step.
STEPS: dict[str, list[tuple[int, ...]]] = {
    "1": [(1,)] * 3,
    "2": [(2,)] * 3,
    "2,3,1": [(2,), (3,), (1,)],
    "1+1": [(1, 1)] * 3,
    "2+2": [(2, 2)] * 3,
    "2+1": [(2, 1)] * 3,
    "1+2": [(1, 2)] * 3,
    "1 to 3 calls": [(1,), (1, 1), (1, 1, 1)],
    "2 to 6": [(2,), (2, 2), (2, 2, 2)],
    "6 to 2": [(2, 2, 2), (2, 2), (2,)],
    "as it comes": [(1, 2), (2, 1), (3,), (1, 1, 1)],
}
#: Where the reduction is asked for: by the schedule, at each call or at the last one of a step, or
#: by hand after a step, where `finalize_model_grads_func` is None.
REDUCTIONS = ("each", "last", "finalize", "finish", "start+finalize", "start+finish")
#: Which calls the program holds inside of `no_sync` itself.
HELD = ("none", "all", "all but the last")


def programs_of(
    setting: Setting,
    steps: dict[str, list[tuple[int, ...]]] = STEPS,
    reductions: tuple[str, ...] = REDUCTIONS,
) -> Iterator[Program]:
    """All combinations of a setting."""
    for (name, calls), reduced, held in itertools.product(steps.items(), reductions, HELD):
        ops: list[tuple[Any, ...]] = []
        for step in calls:
            ops.append(("zero",))
            for index, microbatches in enumerate(step):
                last = index == len(step) - 1
                finalize = reduced == "each" or (reduced == "last" and last)
                hold = held == "all" or (held == "all but the last" and not last)
                ops.append(("call", microbatches, finalize, hold))
            if reduced not in ("each", "last"):
                ops += [(word,) for word in reduced.split("+")]
            ops.append(("use",))
        yield Program(f"{setting}: {name}, {reduced}, held {held}", setting, tuple(ops))


def settings(nets: tuple[str, ...] = ("dense", "experts", "twice")) -> list[Setting]:
    """All settings of one optimizer instance around these nets."""
    switches = [(True, False)] * 3
    return [Setting(*each, net=net) for net in nets for each in itertools.product(*switches)]


def drawn(seed: int) -> Program:
    """A random program: what a caller might do, sensible or not."""
    draw = random.Random(seed)
    setting = Setting(*(draw.random() < 0.6 for _ in range(3)), net=draw.choice(["dense", "twice"]))
    hold = draw.choice(HELD)
    ops: list[tuple[Any, ...]] = []
    for _ in range(6):
        if draw.random() < 0.8:
            ops.append(("zero_by_hand",) if draw.random() < 0.15 else ("zero",))
        calls = draw.choice([1, 1, 2, 3])
        for index in range(calls):
            held = hold == "all" or (hold == "all but the last" and index < calls - 1)
            ops.append(("call", draw.randint(1, 3), draw.random() < 0.3, held))
            if draw.random() < 0.1:
                ops.append(draw.choice([("aborted", 2), ("backward", draw.random() < 0.5)]))
        if draw.random() < 0.2:
            ops.append(("start",))
        ops.append(draw.choice([("finish",), ("finalize",)]))
        ops.append(("use",))
        for word in ("scale", "forward", "held_forward"):
            if draw.random() < 0.2:
                ops.append((word,))
        if draw.random() < 0.3:
            ops += [(draw.choice(["start", "finish", "finalize"]),), ("finish",), ("use",)]
    return Program(f"{setting}: drawn {seed}", setting, tuple(ops))


class Verdict(NamedTuple):
    """Results of stock and patched for one program, all ranks together."""

    stock: str
    """`right`, or what was wrong first: `silently wrong`, or the error."""
    patched: str
    complaint: str | None
    """Why the patches are to blame; None where they are not."""


def judge(program: Program, stock: list[Result], patched: list[Result]) -> Verdict:
    """Compare, use by use: what stock gets right, up to its first fault, stays right.

    From there on the patches may make it right, or raise; nothing may be silently wrong.
    """
    uses, bits, error = _all_ranks(stock)
    patched_uses, patched_bits, patched_error = _all_ranks(patched)
    right = next((i for i, use in enumerate(uses) if not use), len(uses))
    complaint = None
    if patched_uses[:right] != uses[:right]:
        complaint = f"a false alarm at use {len(patched_uses)}: {patched_error}"
    elif patched_bits[:right] != bits[:right]:
        complaint = "other bits than stock's"
    elif not all(patched_uses):
        complaint = f"silently wrong at use {patched_uses.index(False)}"
    elif len(patched_uses) < program.uses and not (patched_error or "").partition(": ")[2]:
        complaint = f"ends without a word: {patched_error}"
    said = [
        "right" if len(found) == program.uses and all(found) and why is None else
        "silently wrong" if not all(found) else str(why)
        for found, why in ((uses, error), (patched_uses, patched_error))
    ]  # fmt: skip
    return Verdict(*said, complaint)


def _all_ranks(results: list[Result]) -> tuple[list[bool], list[tuple[str, ...]], str | None]:
    """Right where every rank is; upstream's ranks may raise in another parameter's name."""
    by_use = list(zip(*(result.uses for result in results), strict=True))
    uses = [all(right for right, _ in ranks) for ranks in by_use]
    bits = [tuple(digest for _, digest in ranks) for ranks in by_use]
    return uses, bits, results[0].error
