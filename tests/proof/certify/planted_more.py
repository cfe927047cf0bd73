"""Sixty bugs that depend on sizes, places and time, and eight right adapters in unusual styles.

Each stands for a kind of mistake that a framework has made or could make. `bugs.py` says on which
layout it is wrong.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from mutations import after, before, but, returning, rows_of, setting, suppressing, taking
from torch import Tensor

from megatron_idempotent import ensure_params_synced, wire_train_config
from megatron_idempotent.proof.certify import Finished, Planted
from megatron_idempotent.proof.certify.adapters import (
    Megatron,
    SplitStep,
    Stateful,
    Window,
    _Loss,
    microbatches,
    updated,
)
from megatron_idempotent.proof.certify.oracle import counted


class Loop:
    """Adds gradients up under `no_sync`; reduces, divides and updates at the end. It is right.

    Every bug below changes one of its small methods. It needs no schedule, so it has one chunk.
    """

    cannot: Any = {}  # noqa: RUF012
    weight = 1.0
    early = True  # parameters are gathered before the first forward, and not by it
    fresh: Any = {}  # noqa: RUF012  what each step begins with

    def build(self, subject: Any) -> None:
        self.subject = subject
        (self.chunk,) = subject.chunks
        self.model = self.chunk  # what computes
        wire_train_config(subject.chunks, subject.optimizer)
        self.open = False

    def begin(self) -> None:
        if self.early:
            self.gather()
        self.zero()
        self.start()

    def gather(self) -> None:
        ensure_params_synced([self.chunk])

    def zero(self) -> None:
        self.chunk.zero_grad_buffer()
        self.subject.optimizer.zero_grad()

    def start(self) -> None:
        self.total = self.count = 0.0
        self.calls = self.number = 0
        self.open = True
        vars(self).update(copy.deepcopy(self.fresh))

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        rows = self.given(rows)
        for index, piece in enumerate(self.pieces(rows)):
            self.one(piece, fail and index == 0)
            self.number += 1
        self.calls += 1
        self.called(rows)

    def given(self, rows: Any) -> Any:
        return rows

    def called(self, rows: Any) -> None:
        return

    def pieces(self, rows: Any) -> list[Any]:
        return microbatches(self.subject, rows)

    def one(self, piece: Any, fail: bool) -> None:
        total, count = self.loss(piece, fail)
        self.backward(total)
        self.add(float(total.detach()), float(count))

    def loss(self, piece: Any, fail: bool) -> tuple[Tensor, Tensor]:
        output = self.subject.forward(self.model, piece)
        if fail:
            raise Planted("the loss fails, as the check asks")
        return self.subject.loss(output, piece)

    def backward(self, total: Tensor) -> None:
        scale = self.subject.config.grad_scale_func
        with self.chunk.no_sync():
            (total * self.weight if scale is None else scale(total * self.weight)).backward()

    def add(self, total: float, count: float) -> None:
        self.total += total
        self.count += count

    def finish(self) -> Finished:
        self.meet(failed=False)
        self.hold(self.watched())
        self.reduce()
        self.chunk.scale_gradients(1 / self.divisor())
        self.hold(*self.sums())
        return self.update()

    def watched(self) -> float:
        """Return the loss that has to be finite."""
        return self.total

    def sums(self) -> list[Tensor]:
        """Return sums of gradients, which have to be finite."""
        return [each.grad_data.sum() for each in self.chunk.buffers]

    def meet(self, *, failed: bool) -> None:
        self.open = False
        self.gather()  # where a rank had no forward
        if self.on_any(failed) and not failed:
            raise RuntimeError("another rank has failed")

    def on_any(self, bad: bool) -> bool:
        return summed(float(bad)) > 0

    def hold(self, *values: Any) -> None:
        if self.on_any(not all(math.isfinite(float(each)) for each in values)):
            raise RuntimeError("a loss or gradient of some rank is NaN or infinite")

    def reduce(self) -> None:
        self.chunk.start_grad_sync()
        self.chunk.finish_grad_sync()

    def divisor(self) -> float:
        return max(summed(self.count), 1.0)

    def update(self) -> Finished:
        updated, _, _ = self.subject.optimizer.step()
        return Finished(updated=updated)

    def abort(self) -> None:
        if self.open:
            self.meet(failed=True)

    def logprobs(self, rows: Any) -> Tensor:
        with torch.no_grad():
            return -self.subject.forward(self.model, rows)

    def export(self) -> dict[str, Tensor]:
        self.gather()
        return self.copied()

    def copied(self) -> dict[str, Tensor]:
        named = self.chunk.module.named_parameters()
        return {name: each.detach().cpu().clone() for name, each in named}

    save, load = Stateful.save, Stateful.load


def forget(subject: Any) -> None:
    """Drop the optimizer's state."""
    for inner, _ in updated(subject):
        inner.state.clear()


def summed(value: float, operation: Any = dist.ReduceOp.SUM) -> float:
    """Add up a number of each rank."""
    told = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(told, op=operation)
    return float(told)


def valid(rows: Any) -> float:
    """Return how many positions of rows count."""
    return float(counted(rows).sum())


def empty(rows: Any) -> bool:
    return not len(rows["input_ids"])


def none_of(rows: Any) -> Any:
    return rows_of(rows, slice(0))


# --- Sizes: how many calls and microbatches there are, and what is in them.


class MeanOfCalls(Loop):
    """Divides each call by its own tokens and averages calls (streaming; NeMo-RL before #3660)."""

    def given(self, rows: Any) -> Any:
        self.weight = 1 / max(valid(rows), 1.0)
        return rows

    def divisor(self) -> float:
        return float(self.calls * dist.get_world_size())


class RowsWeighCalls(Loop):
    """Weighs the mean of a call by its rows (transformers' gradient accumulation)."""

    fresh = {"rows": 0}  # noqa: RUF012

    def given(self, rows: Any) -> Any:
        self.rows += len(rows["input_ids"])
        self.weight = len(rows["input_ids"]) / max(valid(rows), 1.0)
        return rows

    def divisor(self) -> float:
        return max(summed(self.rows), 1.0)


# Takes microbatches in pairs (drop_last).
OddMicrobatchDropped = returning(Loop, "pieces", lambda made: made[: len(made) // 2 * 2] or made)


class LoneCallLost(Loop):
    """Runs the first call at once, and the others two by two (prefetching)."""

    fresh = {"waiting": []}  # noqa: RUF012

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        self.waiting.append(rows)
        if len(self.waiting) == 2 or self.calls == 0:
            for each in self.waiting:
                super().microbatch(each, fail=fail)
            self.waiting = []
        elif fail:
            super().microbatch(rows, fail=fail)


class SingleCountedTwice(Loop):
    """Reduces a call of one microbatch at once, and again at the end (`no_sync` skipped)."""

    def called(self, rows: Any) -> None:
        if summed(len(self.pieces(rows)) == 1):  # on any rank, for all reduce together
            for buffer in self.chunk.buffers:
                dist.all_reduce(buffer.grad_data)


# Has room for six microbatches of a step (fixed buffers).
SixMicrobatches = but(Loop, one=lambda one, self, *args: one(*args) if self.number < 6 else None)


# Has room for eight microbatches of a call (token budget).
EightOfACall = returning(Loop, "pieces", lambda made: made[:8])


class FourthCallLost(Loop):
    """Has a ring of three slots, and drops what comes when it is full (queue)."""

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        super().microbatch(none_of(rows) if self.calls == 3 else rows)
        if fail:
            raise Planted("the loss fails, as the check asks")


# Makes a mean of each microbatch and weighs it by its count (SkyRL #1635).
NothingValidIsNaN = returning(Loop, "loss", lambda made: (made[0] / made[1] * made[1], made[1]))


# Divides by the tokens of a step, be it none (ROLL's token mean).
NothingValidInAStep = but(
    Loop, divisor=lambda _, self: torch.tensor(summed(self.count)), sums=lambda *_: []
)


class EmptyCallEnds(Loop):
    """Takes a call without rows for the end of a step (sentinel)."""

    def given(self, rows: Any) -> Any:
        self.ended = empty(rows) or (self.calls > 0 and self.ended)
        return none_of(rows) if self.ended else rows


# Resets the gradients in a call without rows, so that "all have some" (verl's padding).
EmptyCallZeroes = but(Loop, called=lambda _, self, rows: empty(rows) and self.zero())


class EmptyCallForgetsTokens(Loop):
    """Reports the metrics of the last call, which has none without rows (SkyRL #1817)."""

    def called(self, rows: Any) -> None:
        if empty(rows):
            self.count = 0.0


# Repeats the last microbatch where their number is odd (ms-swift, ROLL: padded batches).
PadsByRepeating = returning(
    Loop, "pieces", lambda made: made + made[-1:] if len(made) > 1 and len(made) % 2 else made
)


# Leaves out what other ranks do not have in a call (join of uneven inputs).
CutsToTheLeast = returning(
    Loop, "pieces", lambda made: made[: int(summed(len(made), dist.ReduceOp.MIN))]
)


class TokensOfRankZero(Loop):
    """Lets rank 0 say how many tokens each rank has (driver's metrics)."""

    def divisor(self) -> float:
        told = torch.tensor(self.count, dtype=torch.float64)
        dist.broadcast(told, 0)
        return max(float(told) * dist.get_world_size(), 1.0)


# Lists the tokens of microbatches that have some, beside all of them (zip).
WeightsOutOfStep = returning(Loop, "pieces", lambda made: made[: sum(map(bool, map(valid, made)))])


# Leaves the loop at a microbatch of which nothing counts (break for continue).
StopsAtMasked = returning(Loop, "pieces", lambda made: [*itertools.takewhile(valid, made)])


class MaskedBeginsAgain(Loop):
    """Overwrites gradients after a microbatch of which nothing counts (is_first flag)."""

    masked = False

    def one(self, piece: Any, fail: bool) -> None:
        if self.masked:
            self.zero()
        super().one(piece, fail)
        self.masked = not valid(piece)


class CountsInBF16(Loop):
    """Counts tokens in the type of the model (bfloat16 has 8 bits)."""

    def add(self, total: float, count: float) -> None:
        told = torch.tensor(self.count, dtype=torch.bfloat16) + count
        self.total, self.count = self.total + total, float(told)


class CountsTheFirstToken(Loop):
    """Counts a mask that is not shifted, less one for each row (off by one at prompts)."""

    def one(self, piece: Any, fail: bool) -> None:
        total, _ = self.loss(piece, fail)
        self.backward(total)
        mask_B = (piece["token_mask"] * piece["sample_mask"][:, None]).sum(1)
        self.add(float(total.detach()), float((mask_B - 1).clamp(min=0).sum()))


# Does not update where the rank has no tokens (early return).
RankWithoutTokensStays = but(
    Loop, update=lambda update, self: update() if self.count else Finished()
)


class MaskOfTheFirstStep(Loop):
    """Keeps the masks of each call from the first step on (cache by index)."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.masks: dict[Any, Any] = {}

    def given(self, rows: Any) -> Any:
        key = self.calls, rows["input_ids"].shape
        kept = self.masks.setdefault(key, rows["token_mask"])
        return {**rows, "token_mask": kept}


# Leaves out microbatches of which nothing counts; experts' losses count there too.
SkipsMasked = returning(Window, "_pieces", lambda made: [piece for piece in made if valid(piece)])


# Runs a microbatch once more if there are fewer than stages (pipeline bubbles).
RepeatsToFillStages = taking(
    SplitStep,
    "microbatch",
    lambda self, rows: rows_of(rows, [0, 1, 0, 1] if len(rows["scale"]) == 2 else slice(None)),
)


def _sorted_alone(self: Any, rows: Any) -> Any:
    if "lengths" not in rows:
        return rows
    alone = {name: rows[name] for name in ("sample_mask", "scale")}
    return {**rows_of(rows, rows["lengths"].argsort(stable=True)), **alone}


# Sorts rows by length for packs, and leaves their sample masks where they are.
LengthsSortedAlone = taking(SplitStep, "microbatch", _sorted_alone)


class LossOfCalls(Loop):
    """Reports the mean of the calls' mean losses (logging)."""

    like = SplitStep  # which reports one
    fresh = {"means": []}  # noqa: RUF012

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        before = self.total
        super().microbatch(rows, fail=fail)
        self.means.append((self.total - before) / max(valid(rows), 1.0))

    def update(self) -> Finished:
        mean = summed(sum(self.means)) / len(self.means) / dist.get_world_size()
        return dataclasses.replace(super().update(), loss=mean)


# --- Places: where a failure or a NaN is, and who learns of it.


# Logs an error of any call but the first (retry wrapper).
SwallowsLaterCalls = suppressing(Loop, "microbatch", Exception, calls=1)


# Skips what runs out of memory in backward (verl, OOM guard).
SwallowsBackward = suppressing(Loop, "backward", RuntimeError)


class _Quiet(_Loss):
    number = 0

    def __call__(self, output: Any, microbatch: Any) -> Any:
        self.number += 1
        try:
            return super().__call__(output, microbatch)
        except Exception:
            if self.number == 1:
                raise
            return 0 * output.sum(), {"nll": 0 * output.detach().sum()}


class SwallowsLaterLosses(SplitStep):
    """Takes 0 for a loss that fails after the first of a step (pipeline that may not stop)."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.loss = _Quiet(subject)

    def begin(self) -> None:
        super().begin()
        self.loss.number = 0


class LastMicrobatchDecides(Loop):
    """Notes whether a microbatch failed, and forgets it with the next (overwritten status)."""

    fresh = {"failed": False}  # noqa: RUF012

    def one(self, piece: Any, fail: bool) -> None:
        self.failed = True
        with contextlib.suppress(Exception):
            super().one(piece, fail)
            self.failed = False

    def finish(self) -> Finished:
        if self.failed:
            raise RuntimeError("the last microbatch failed")
        return super().finish()


class OnlyLastRankIsHeard(Loop):
    """Lets the last rank say whether a step failed (broadcast for a reduction)."""

    def on_any(self, bad: bool) -> bool:
        told = torch.tensor(float(bad))
        dist.broadcast(told, dist.get_world_size() - 1)
        return bool(told)

    def abort(self) -> None:
        if self.open:
            self.open = False
            self.gather()
            if not self.on_any(True):
                self.drain()  # the others go on

    def drain(self) -> None:
        """Take part in what the others' `finish` does."""
        self.hold(0.0)
        self.reduce()
        self.divisor()
        self.hold(0.0)


# Looks at the loss alone.
LooksAtTheLossAlone = but(Loop, sums=lambda *_: [])


# Looks at the loss of rank 0 alone (metrics).
NaNOfRankZero = but(
    LooksAtTheLossAlone,
    watched=lambda watched, self: 0.0 if dist.get_rank() else watched(),
)


class NaNOfTheFirst(LooksAtTheLossAlone):
    """Looks at the first microbatch's loss alone (check in warm-up)."""

    fresh = {"looked": 0.0}  # noqa: RUF012

    def add(self, total: float, count: float) -> None:
        self.looked = total if self.number == 0 else self.looked
        super().add(total, count)

    def watched(self) -> float:
        return self.looked


class NaNUnlessInTheLastCall(NaNOfTheFirst):
    """Looks at the loss of a call when the next one comes (asynchronous metrics)."""

    add = Loop.add

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        self.looked = self.total
        super().microbatch(rows, fail=fail)


class NaNClearsMoments(Loop):
    """Makes an optimizer of its own again after a NaN (recovery)."""

    def hold(self, *values: Any) -> None:
        try:
            super().hold(*values)
        except RuntimeError:
            forget(self.subject)
            raise


class DropsItsOwnNaN(LooksAtTheLossAlone):
    """Leaves a rank's gradients out if its loss is NaN, and updates."""

    def watched(self) -> float:
        if not math.isfinite(self.total):
            self.zero()
            self.count = 0.0
        return 0.0


class DrainsCollectives(OnlyLastRankIsHeard):
    """Takes part in the others' reductions after a failure, so that they do not hang."""

    fresh = {"failed": False}  # noqa: RUF012

    def on_any(self, bad: bool) -> bool:
        return Loop.on_any(self, bad)

    def meet(self, *, failed: bool) -> None:
        self.open = False
        self.gather()

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        self.failed = True
        super().microbatch(rows, fail=fail)
        self.failed = False

    def abort(self) -> None:
        if self.open and self.failed:
            self.gather()
            self.drain()
        self.open = False


class SecondErrorIsQuiet(Loop):
    """Raises an error once, and logs it later (rate limit)."""

    told = False

    def one(self, piece: Any, fail: bool) -> None:
        try:
            super().one(piece, fail)
        except Exception:
            if not self.told:
                self.told = True
                raise


class KeepsFailedWindow(Loop):
    """Zeroes gradients after an update alone (SkyRL: `skyrl-failed-window-kept`)."""

    cannot = {"abort-and-retry": "there is no call that drops an open step"}  # noqa: RUF012

    def begin(self) -> None:
        self.gather()
        self.start()

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.zero()

    def hold(self, *values: Any) -> None:
        try:
            super().hold(*values)
        except RuntimeError:
            self.zero()
            raise

    def update(self) -> Finished:
        found = super().update()
        self.zero()
        return found


class ZeroesWhereItFailed(KeepsFailedWindow):
    """Zeroes gradients on the rank that failed, and not on those that are told."""

    cannot: Any = {}  # noqa: RUF012

    def abort(self) -> None:
        mine = self.open
        super().abort()
        if mine:
            self.zero()


class UndoesTheLastCall(KeepsFailedWindow):
    """Goes back to the gradients before the last call in an abort (snapshot for each call)."""

    cannot: Any = {}  # noqa: RUF012

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        self.kept = [each.grad_data.clone() for each in self.chunk.buffers]
        super().microbatch(rows, fail=fail)

    def start(self) -> None:
        super().start()
        self.kept = [each.grad_data.clone() for each in self.chunk.buffers]

    def abort(self) -> None:
        super().abort()
        for buffer, kept in zip(self.chunk.buffers, self.kept, strict=True):
            buffer.grad_data.copy_(kept)


class AbortKeepsQueue(Loop):
    """Runs calls in `finish`, and lets an abort leave them in the queue from the second on."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.queue: list[Any] = []

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        if fail:
            super().microbatch(rows, fail=fail)
        self.queue.append(rows)

    def finish(self) -> Finished:
        queue, self.queue = self.queue, []
        for rows in queue:
            super().microbatch(rows)
        return super().finish()

    def abort(self) -> None:
        super().abort()
        self.queue = self.queue[1:]


class FrozenByFailure(Loop):
    """Freezes a norm while it computes a loss, and after a failure for ever (ms-swift #9452)."""

    def loss(self, piece: Any, fail: bool) -> tuple[Tensor, Tensor]:
        output = self.subject.forward(self.chunk, piece)
        weight = self.chunk.module.decoder.final_layernorm.weight
        weight.requires_grad_(False)
        if fail:
            raise Planted("the loss fails, as the check asks")
        found = self.subject.loss(output, piece)
        weight.requires_grad_(True)
        return found


# --- Time: what is late, or stays from a call or a step to the next.


def hooked(chunk: Any) -> bool:
    """Return whether Megatron gathers parameters in forward."""
    return chunk.ddp_config.overlap_param_gather and bool(chunk.remove_forward_pre_hook_handles)


class NeverGathers(Loop):
    """Computes with the module inside of the chunk, with hooks off, and gathers no parameters."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.model = self.chunk.module
        if hooked(self.chunk):
            self.chunk.disable_forward_pre_hook(param_sync=False)

    def gather(self) -> None:
        return


class GathersLate(NeverGathers):
    """Waits for parameters after the first call (overlap)."""

    fresh = {"late": False}  # noqa: RUF012

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        try:
            super().microbatch(rows, fail=fail)
        finally:
            if not self.late:
                ensure_params_synced([self.chunk])
                self.late = True


class LogprobsOfStale(Loop):
    """Gives an engine the parameters of a step before they are gathered, and asks it."""

    early = False
    sent: Any = None

    def update(self) -> Finished:
        found = super().update()
        self.sent = self.copied()
        return found

    def logprobs(self, rows: Any) -> Tensor:
        self.gather()
        now = self.copied()
        self.put(self.sent or now)
        found = super().logprobs(rows)
        self.put(now)
        return found

    def put(self, values: dict[str, Tensor]) -> None:
        for name, each in self.chunk.module.named_parameters():
            each.data.copy_(values[name])


class HooksLeftOff(Loop):
    """Turns hooks off for log-probs, and not on again (NeMo-RL, verl)."""

    early = False

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.model = self.chunk.module

    def gather(self) -> None:
        if hooked(self.chunk):
            super().gather()

    def logprobs(self, rows: Any) -> Tensor:
        if hooked(self.chunk):
            self.chunk.disable_forward_pre_hook(param_sync=True)
        return super().logprobs(rows)


# Copies parameters without gathering them (`params-stale-after-step`).
ExportsStale = setting(Loop, early=False, export=Loop.copied)


# Exports buffers that nobody fills (empty weight buckets; slime #2134).
ExportsZeros = returning(
    Loop, "export", lambda made: {name: torch.zeros_like(value) for name, value in made.items()}
)


# Leaves the last bucket out (partial flush; SkyRL #1737).
ExportsAPart = returning(Loop, "export", lambda made: dict([*made.items()][:-2]))


class ExportsTheFirst(Loop):
    """Exports what it exported first (cached by version)."""

    sent: Any = None

    def export(self) -> dict[str, Tensor]:
        self.sent = self.sent or super().export()
        return self.sent


class ExportsTheLast(Loop):
    """Exports what was there one export before (double buffer)."""

    sent: Any = None

    def export(self) -> dict[str, Tensor]:
        now = super().export()
        before, self.sent = self.sent or now, now
        return before


# Turns eval mode on for log-probs, and not off again (NeMo-RL, SkyRL).
EvalLeftOn = before(Loop, "logprobs", lambda self: self.chunk.eval())


# Turns eval mode on for an abort's clean-up, and not off again.
EvalLeftByAbort = after(Loop, "abort", lambda self: self.chunk.module.decoder.layers[-1].eval())


class LogprobsOfTheStep(Loop):
    """Keeps log-probs until parameters change, by the shape of rows (memo)."""

    fresh = {"memo": {}}  # noqa: RUF012

    def logprobs(self, rows: Any) -> Tensor:
        if not self.open:
            return super().logprobs(rows)
        key = rows["input_ids"].shape
        if key not in self.memo:
            self.memo[key] = super().logprobs(rows)
        return self.memo[key]


# Takes the loss scale away for log-probs, and does not put it back (fp16).
ScaleFuncLost = before(
    Loop, "logprobs", lambda self: setattr(self.subject.config, "grad_scale_func", None)
)


class FifthStepForgets(Loop):
    """Drops the optimizer's state every fifth step (memory clean-up)."""

    steps = 0

    def update(self) -> Finished:
        self.steps += 1
        if self.steps % 5 == 0:
            forget(self.subject)
        return super().update()


class CleanAfterEmpty(Loop):
    """Zeroes gradients if they were touched, which a last call without rows denies."""

    touched = True

    def called(self, rows: Any) -> None:
        self.touched = not empty(rows)

    def zero(self) -> None:
        if self.touched:
            super().zero()
        self.touched = True


class HooksStayAfterAbort(Loop):
    """Doubles gradients in a hook, and halves their sum; an abort leaves the hook there."""

    def start(self) -> None:
        super().start()
        weight = self.chunk.module.output_layer.weight
        self.hook = weight.register_hook(lambda gradient: 2 * gradient)

    def reduce(self) -> None:
        self.chunk.module.output_layer.weight.main_grad.mul_(0.5)
        super().reduce()

    def hold(self, *values: Any) -> None:
        self.hook.remove()
        super().hold(*values)


# --- Right adapters.


class KnownTotals(Loop):
    """Runs all microbatches in `finish`, each divided by tokens that are known then."""

    fresh = {"kept": []}  # noqa: RUF012

    def one(self, piece: Any, fail: bool) -> None:
        if fail:
            super().one(piece, fail)
        self.kept.append(piece)

    def finish(self) -> Finished:
        self.meet(failed=False)  # a rank whose call has failed counts nothing
        self.open = True
        tokens = max(summed(sum(map(valid, self.kept))), 1.0)
        self.weight = 1 / tokens
        for each in self.kept:
            super().one(each, fail=False)
        return super().finish()

    def divisor(self) -> float:
        return 1.0


class SumsOutside(Loop):
    """Adds the gradients of each microbatch up in buffers of its own, and copies them in."""

    def start(self) -> None:
        super().start()
        self.own = [torch.zeros_like(each.grad_data) for each in self.chunk.buffers]

    def backward(self, total: Tensor) -> None:
        super().backward(total)
        for own, buffer in zip(self.own, self.chunk.buffers, strict=True):
            own += buffer.grad_data
            buffer.grad_data.zero_()

    def reduce(self) -> None:
        for own, buffer in zip(self.own, self.chunk.buffers, strict=True):
            buffer.grad_data.copy_(own)
        super().reduce()


class OneCallEach(Window):
    """Calls Megatron's schedule for each microbatch."""

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        for piece in microbatches(self.subject, rows):
            super().microbatch(piece, fail=fail)


# Calls Megatron's schedule once for a step, with the last call's microbatches first.
AllInOneCall = taking(Megatron, "_train", lambda self, pieces: [*reversed(pieces)])


class ReplaysAfterFailure(Loop):
    """Runs a step again from its rows when a call has failed, and raises if it fails again."""

    fresh = {"kept": []}  # noqa: RUF012

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        try:
            super().microbatch(rows, fail=fail)
        except Planted:
            kept = self.kept
            self.zero()
            self.start()
            for each in kept:
                self.microbatch(each)
            super().microbatch(rows, fail=fail)
        self.kept.append(rows)


class SortsByLength(KnownTotals):
    """Cuts the rows of a whole step into microbatches by the number of tokens that count."""

    def finish(self) -> Finished:
        if self.kept:
            rows = {name: torch.cat([each[name] for each in self.kept]) for name in self.kept[0]}
            order = counted(rows).sum(1).argsort(stable=True)
            self.kept = self.pieces({name: each[order] for name, each in rows.items()})
        return super().finish()


# Makes all of its objects again in an abort.
AbortRebuilds = after(SplitStep, "abort", lambda self: self.build(self.subject))
