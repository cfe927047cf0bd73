"""Bugs in a table: each is `Loop`, or another right adapter, with one method that has a mistake.

The first part has bugs that passed while certify drew tame rows, numbers, times and errors. The
check that catches each is in `bugs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from mutations import but, returning, rows_of, setting, suppressing, taking
from planted_more import LooksAtTheLossAlone, Loop, NaNOfTheFirst, none_of

from megatron_idempotent.proof.certify import Finished
from megatron_idempotent.proof.certify.adapters import SplitStep, parameters_of, updated


def gradients(self: Any) -> list[Any]:
    return [buffer.grad_data for chunk in self.subject.chunks for buffer in chunk.buffers]


# --- Rows and lengths.

DropsTheRest = returning(Loop, "pieces", lambda made: [p for p in made if len(p["scale"]) == 2])


def _rest_as_a_whole(original: Any, self: Any, piece: Any, fail: bool) -> Any:
    total, count = original(piece, fail)
    return total * 2 / len(piece["scale"]), count


RestWeighsAsMuch = but(Loop, loss=_rest_as_a_whole)
PadsTheRest = taking(
    Loop,
    "microbatch",
    lambda self, rows: rows_of(
        rows, [*range(len(rows["scale"])), *[-1] * (len(rows["scale"]) % 2)]
    ),
)
LogprobsStaySorted = taking(
    Loop,
    "logprobs",
    lambda self, rows: rows_of(rows, rows["token_mask"].sum(1).argsort(stable=True)),
)
LogprobsOfEight = returning(
    Loop, "logprobs", lambda made: torch.cat([made[:8], torch.zeros_like(made[8:])])
)


def _looked_up(key_of: Callable[[Any], Any]) -> Callable[..., Any]:
    def looked_up(original: Any, self: Any, rows: Any) -> Any:
        answers = vars(self).setdefault("answers", {})
        tokens_BT = rows["input_ids"]
        if key_of(tokens_BT) not in answers:
            # With the tensor, whose address no other one has meanwhile.
            answers[key_of(tokens_BT)] = original(rows), tokens_BT
        return answers[key_of(tokens_BT)][0]

    return looked_up


def _forgetting(original: Any, self: Any) -> Any:
    vars(self).pop("answers", None)
    return original()


LogprobsOfContent = but(Loop, logprobs=_looked_up(lambda tokens_BT: str(tokens_BT.tolist())))
LogprobsOfATensor = but(Loop, logprobs=_looked_up(id), update=_forgetting)


# --- Numbers.


def _clipping_at(limit: float) -> type:
    def clipped(original: Any, self: Any) -> None:
        norm = math.sqrt(sum(float(each.square().sum()) for each in gradients(self)))
        mean = norm / max(self.count, 1.0)
        if mean > limit:
            self.chunk.scale_gradients(limit / mean)
        original()

    return but(Loop, reduce=clipped)


ClipsItsOwn, ClipsAtHundred = _clipping_at(1.0), _clipping_at(100.0)
CountsTenAtLeast = but(Loop, divisor=lambda original, self: max(original(), 10.0))
LooksForNaNAlone = but(
    LooksAtTheLossAlone,
    watched=lambda watched, self: 0.0 if math.isinf(watched()) else watched(),
)


def _rounded_sums(original: Any, self: Any, total: Any) -> None:
    original(total)
    for each in self.chunk.parameters():
        each.main_grad.copy_(each.main_grad.to(each.dtype))


SumsAsParameters = but(Loop, backward=_rounded_sums)


def _rounded_moments(original: Any, self: Any) -> Any:
    found = original()
    for inner, each in updated(self.subject):
        for name in ("exp_avg", "exp_avg_sq"):
            if name in inner.state[each]:
                value = inner.state[each][name]
                value.copy_(value.to(next(self.chunk.parameters()).dtype))
    return found


def _rounded_mains(original: Any, self: Any) -> Any:
    found = original()
    for _, each in updated(self.subject):
        each.data.copy_(each.to(next(self.chunk.parameters()).dtype))
    return found


MainsAsParameters = but(Loop, update=_rounded_mains)
MomentsAsParameters = but(Loop, update=_rounded_moments)


def _half_count(original: Any, self: Any, total: float, count: float) -> None:
    self.total += total
    self.count = float(torch.tensor(self.count, dtype=torch.float16) + count)


CountsInFloat16 = but(Loop, add=_half_count)
AddsUpCountsInFloat16 = but(
    Loop, divisor=lambda original, self: float(torch.tensor(original()).half())
)


# --- Time.


QuietAfterFourCalls = suppressing(Loop, "microbatch", Exception, calls=4)


class LooksAtFourCalls(NaNOfTheFirst):
    def add(self, total: float, count: float) -> None:
        if self.calls < 4:
            self.looked += total
        Loop.add(self, total, count)


class TwelfthKeepsGradients(Loop):
    steps = 0

    def zero(self) -> None:
        self.steps += 1
        if self.steps % 12:
            super().zero()


class SkipsSpikes(Loop):
    """Takes no step whose gradient is ten times as large as the mean of four before it."""

    norms: Any = ()

    def update(self) -> Finished:
        norm = math.sqrt(sum(float(each.square().sum()) for each in gradients(self)))
        spike = len(self.norms) == 4 and norm > 10 * sum(self.norms) / 4
        self.norms = (*self.norms[-3:], norm)
        return Finished(updated=False) if spike else super().update()


# --- Checkpoints.

SavesLive = but(
    Loop,
    save=lambda original, self: {
        **original(),
        "model": [each.detach() for each in parameters_of(self.subject)],
        "main": [each.detach() for _, each in updated(self.subject)],
    },
)


# --- Errors.

LogsValueErrors = suppressing(Loop, "one", ValueError)
LogsKeyErrors = suppressing(Loop, "one", KeyError)
LogsMemoryErrors = suppressing(Loop, "one", MemoryError)
LogsOutOfMemory = suppressing(Loop, "one", torch.OutOfMemoryError)
LogsAssertions = suppressing(Loop, "one", AssertionError)


def _interrupted(original: Any, self: Any, *args: Any, **how: Any) -> None:
    try:
        original(*args, **how)
    except Exception:
        raise
    except BaseException:  # noqa: BLE001  the bug
        return


LogsInterrupts = but(Loop, one=_interrupted)


def _again(original: Any, self: Any, *args: Any, **how: Any) -> None:
    try:
        original(*args, **how)
    except Exception:  # noqa: BLE001  the bug: layers whose backward was done have its gradient
        original(*args, **how)


RunsAgain = but(Loop, one=_again)


# --- What is no answer.


async def _later(value: Any) -> Any:
    return value


FinishesWithNone = returning(Loop, "finish", lambda found: None)
FinishesWithDict = returning(Loop, "finish", lambda found: {"updated": True})
FinishesLater = returning(Loop, "finish", _later)
ReportsAWord = returning(Loop, "finish", lambda found: type(found)(loss="low"))  # type: ignore[call-arg]
LogprobsInAList = returning(Loop, "logprobs", lambda found: found.tolist())
LogprobsTurned = returning(Loop, "logprobs", lambda found: found.T)
LogprobsNowhere = returning(Loop, "logprobs", lambda found: None)


class AsyncFinish(Loop):
    async def finish(self) -> Any:  # type: ignore[override]
        return super().finish()


KeepsAString = setting(SplitStep, keeps="scheduler")
KeepsASchedule = setting(SplitStep, keeps=("schedule",))
ReshardsData = setting(SplitStep, reshards=("data",))


class LosesASecondCall(SplitStep):
    """Leaves out the second call of a step."""

    def begin(self) -> None:
        super().begin()
        self.calls = 0

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        self.calls += 1
        super().microbatch(none_of(rows) if self.calls == 2 else rows, fail=fail)
