"""Plays a few steps of an adapter without `certify`'s checks, to show that a bug is one.

A script is steps, joined by "; ", each of calls, joined by " ". A call is the number of
microbatches of each replica, "2" or "1/3", with letters for what is in them:

    m  nothing counts in the last microbatch       x  its loss fails
    f  nothing counts in the first one             b  its backward fails
    M  nothing counts at all                       w  its forward fails
    p  the first third of each row does not count  n  it is NaN
    h  rows count unlike numbers of positions      l  as h, with lengths

Words in the place of a call: `logprobs`, `export`, `abort` and `save`, which goes on with a new
model. A step of these alone is between steps.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
import torch.distributed as dist

import megatron_idempotent
from megatron_idempotent.proof.certify import layout as named
from megatron_idempotent.proof.certify.protocol import MICRO_BATCH, Planted

FAULTS = {"x": 1, "b": 2, "w": 3}


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        raise Planted("backward fails")


def _fault(rows: Any) -> int:
    return int(rows["fault"].max()) if "fault" in rows and len(rows["fault"]) else 0


def _with_faults(subject: Any) -> Any:
    def forward(chunk: Any, rows: Any) -> Any:
        if torch.is_grad_enabled() and _fault(rows) == 3:
            raise Planted("forward fails")
        return subject.forward(chunk, rows)

    def loss(output: Any, rows: Any) -> Any:
        if _fault(rows) == 1:
            raise Planted("the loss fails")
        total, count = subject.loss(output, rows)
        return (_Fails.apply(total) if _fault(rows) == 2 else total), count

    return dataclasses.replace(subject, forward=forward, loss=loss)


def rows_of(bench: Any, call: str, seed: int, *, faulty: bool) -> Any:
    """Make this replica's rows of a call."""
    parts = call.split("/")
    number, letters = re.fullmatch(r"(\d)(\w*)", parts[bench.replica % len(parts)]).groups()  # type: ignore[union-attr]
    rows = bench.rows(bench.replica, seed, MICRO_BATCH * int(number))
    mask_BT, last = rows["token_mask"], slice(-MICRO_BATCH, None)
    length = mask_BT.shape[1]
    for letter in letters:
        if letter == "m":
            mask_BT[last] = 0
        elif letter == "f":
            mask_BT[:MICRO_BATCH] = 0
        elif letter == "M":
            mask_BT[:] = 0
        elif letter == "p":
            mask_BT[:, : length // 3] = 0
        elif letter in "hl":
            for row, each_T in enumerate(mask_BT):
                each_T[3 + (7 * row + seed) % (length - 3) :] = 0
            rows["sample_mask"][: int(letter == "l")] = 0
            if letter == "l":
                from megatron_idempotent.proof.certify import packs

                rows = packs.shorten(rows, [32 - 3 * (row % 5) for row in range(len(mask_BT))])
        elif letter == "n":
            rows["scale"][-1] = float("nan")
    faults = {"fault": torch.zeros(len(mask_BT))} if faulty else {}
    for letter in set("xbw") & set(letters):
        faults["fault"][-1] = FAULTS[letter]
    return {**rows, **faults}


def played(bug: str, layout: str, script: str, *, instead: bool) -> list[Any]:
    """Run a script on this rank; return what was seen of each step, and at last the parameters.

    With `instead`, run the right adapter that the bug was put into.
    """
    import planted_more

    from megatron_idempotent.proof.certify import adapters
    from megatron_idempotent.proof.certify.bench import Bench

    megatron_idempotent.apply()
    found = getattr(planted_more, bug)
    if instead:
        right = (planted_more.Loop, adapters.Window, adapters.SplitStep)
        found = getattr(found, "like", next(each for each in found.mro() if each in right))

    class Faulty(found):  # type: ignore[misc, valid-type]
        def build(self, subject: Any) -> None:
            super().build(_with_faults(subject))

    bench = Bench(Faulty(), named(layout))
    adapter: Any = bench.adapter
    starts = [each.detach().clone() for each in parameters(bench)]
    seen: list[Any] = []
    faulty = bool(re.search(r"\d[a-z]*[xbw]", script))
    # Not `whole()`, which gathers what an adapter has not gathered: at the end alone.
    for place, step in enumerate(script.split("; ")):
        words = step.split()
        open_ = any(word[0].isdigit() or word == "abort" for word in words)
        try:
            if open_:
                adapter.begin()
            for call, word in enumerate(words):
                if word == "logprobs":
                    told = adapter.logprobs(bench.rows(bench.replica, 500 + len(seen), 2))
                    seen.append(None if told is None else told[:, :-1])
                elif word == "export":
                    told = adapter.export()
                    seen.append(adapter.exported if told is None else [*told.values()])
                elif word == "save":
                    state = adapter.save()
                    bench.make_model()
                    adapter.build(bench.subject)
                    adapter.load(state)
                elif word == "abort":
                    adapter.abort()
                    open_ = False
                else:
                    adapter.microbatch(rows_of(bench, word, 17 * place + call, faulty=faulty))
            if open_:
                done = adapter.finish()
                seen += ["updated" if done.updated else "skipped", done.loss]
        except Exception as error:  # noqa: BLE001  what a step raises is what is asked for
            adapter.abort()
            seen.append("raised")
            if not isinstance(error, (Planted, RuntimeError)):
                seen.append(type(error).__name__)
        modules = [each for chunk in bench.subject.chunks for each in chunk.modules()]
        seen.append([each.training for each in modules])
        # Replicas have to agree in what became of the step.
        told_by_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told_by_all, [e for e in seen if isinstance(e, str)])
        seen.append(told_by_all)
    megatron_idempotent.ensure_params_synced(bench.subject.chunks)
    ends = parameters(bench)
    seen.append([end.detach() - start for end, start in zip(ends, starts, strict=True)])
    seen.append([each.requires_grad for each in ends])
    return seen


def parameters(bench: Any) -> list[Any]:
    return [each for chunk in bench.subject.chunks for each in chunk.module.parameters()]


def difference(found: list[Any], right: list[Any]) -> str:
    """Return where two runs of a script differ by more than roundings; "" if nowhere."""
    if len(found) != len(right):
        return f"{len(found)} observations for {len(right)}"
    for place, (one, other) in enumerate(zip(found, right, strict=True)):
        error = _error(one, other)
        if error > 1e-3:
            return f"observation {place} of {len(found)} is off by {error:.2g}"
    return ""


def _error(one: Any, other: Any) -> float:
    if isinstance(one, list) and one and torch.is_tensor(one[0]):
        if len(one) != len(other):
            return float("inf")
        one, other = (torch.cat([v.double().flatten() for v in each]) for each in (one, other))
    if torch.is_tensor(one) and torch.is_tensor(other):
        error, size = float((one.double() - other.double()).norm()), float(other.double().norm())
        if error <= 1e-12:
            return 0.0
        return error / size if size and error == error else float("inf")
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) / abs(other)
    if one is None or other is None:
        return 0.0
    return 0.0 if one == other else float("inf")
