"""`SplitStep` with one bug each that shows in some sizes, places and times, and not in others."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from planted import _Divided, _finished

from megatron_idempotent import TrainStep
from megatron_idempotent.proof.certify.adapters import SplitStep, _logprobs, _Loss
from megatron_idempotent.proof.certify.oracle import counted


class _ByCall(SplitStep):
    """Knows the number of the call; no bug yet."""

    def begin(self) -> None:
        super().begin()
        self.call = 0

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        self.call += 1
        super().microbatch(self.changed(rows), fail=fail)

    def changed(self, rows: Any) -> Any:
        return rows


def first(rows: Any, number: int) -> Any:
    """The first rows of a call."""
    return {name: each[:number] for name, each in rows.items()}


class FourthCallLost(_ByCall):
    """Has room for three calls."""

    def changed(self, rows: Any) -> Any:
        return first(rows, 0) if self.call == 4 else rows


class OddOneDropped(_ByCall):
    """Takes microbatches in pairs, where there are two."""

    def changed(self, rows: Any) -> Any:
        number = len(rows["input_ids"])
        return first(rows, number // 4 * 4) if number > 2 else rows


class OneCountsTwice(_ByCall):
    """Adds a call of one microbatch up twice."""

    def changed(self, rows: Any) -> Any:
        if len(rows["input_ids"]) != 2:
            return rows
        return {**rows, "scale": 2 * rows["scale"]}


class _Mean(_Divided):
    count = 1.0

    def __call__(self, output: Any, microbatch: Any) -> Any:
        total, told = super().__call__(output, microbatch)
        return total / self.count, told


class MeanOfCalls(SplitStep):
    """Takes each call's mean over its own tokens, on all ranks, and averages the calls."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.loss = _Mean(subject)

    def begin(self) -> None:
        super().begin()
        self.calls = 0

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        from megatron.core import parallel_state

        number = counted(rows).sum()
        group = parallel_state.get_data_parallel_group(with_context_parallel=False)
        torch.distributed.all_reduce(number, group=group)
        self.loss.count = max(float(number), 1.0)
        self.calls += 1
        super().microbatch(rows, fail=fail)

    def finish(self) -> Any:
        return _finished(
            self.step.finish(self.open, global_batch_size=1, divisor=float(self.calls))
        )


class _OverZero(_Loss):
    def __call__(self, output: Any, microbatch: Any) -> Any:
        total, told = super().__call__(output, microbatch)
        number = counted(microbatch).sum() if "input_ids" in microbatch else 1.0
        return total / number * number, told


class MicrobatchOverZero(SplitStep):
    """Takes the mean of each microbatch, in one of which nothing counts, and multiplies again."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.loss = _OverZero(subject)


class OnlyTheLastRank(SplitStep):
    """Asks the last rank alone whether it has failed."""

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        last = torch.distributed.get_world_size() - 1
        super().microbatch(rows, fail=fail and torch.distributed.get_rank() == last)


class SwallowsLaterErrors(_ByCall):
    """Logs an error after the first call, and goes on."""

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        super().microbatch(rows, fail=fail and not self.call)


class FirstNaNAlone(SplitStep):
    """Looks for NaN on the first replica's rows alone, and updates otherwise."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.step = TrainStep(
            subject.chunks,
            subject.optimizer,
            forward=self.forward,
            deadline_s=20.0,
            non_finite="update",
        )

    def begin(self) -> None:
        super().begin()
        self.bad = False

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        self.bad = self.bad or bool(rows["scale"].isnan().any())
        super().microbatch(rows, fail=fail)

    def finish(self) -> Any:
        bad = torch.tensor(float(self.bad))
        torch.distributed.broadcast(bad, 0)
        if bad:
            self.abort()
            raise RuntimeError("a loss is NaN")
        return super().finish()


class EvalLeftOn(SplitStep):
    """Leaves the layers in eval mode."""

    def logprobs(self, rows: Any) -> Any:
        found = _logprobs(self.subject, rows)
        for chunk in self.subject.chunks:
            for name, each in chunk.named_modules():
                if name.endswith("decoder"):
                    each.eval()
        return found


class ExportsBeforeTheGather(SplitStep):
    """Reads the parameters as they are."""

    def export(self) -> None:
        self.exported = [
            each.detach().clone()
            for chunk in self.subject.chunks
            for each in chunk.module.parameters()
        ]


class ExportsZeros(SplitStep):
    """Allocates, and copies nothing."""

    def export(self) -> None:
        super().export()
        self.exported = [torch.zeros_like(each) for each in self.exported]


class ExportsTheFirst(SplitStep):
    """Goes on giving what it has exported first."""

    def export(self) -> None:
        if not hasattr(self, "exported"):
            super().export()


class Bfloat16Sums(SplitStep):
    """Adds gradients up in 16 bits."""

    def finish(self) -> Any:
        for chunk in self.subject.chunks:
            for each in chunk.parameters():
                each.main_grad.copy_(each.main_grad.bfloat16())
        return super().finish()


class Clips(SplitStep):
    """Clips, as Megatron does where it is told to."""

    def build(self, subject: Any) -> None:
        subject.optimizer.config.clip_grad = 0.1
        super().build(subject)


class ClipsItself(SplitStep):
    """Clips to 0.1 by itself."""

    def finish(self) -> Any:
        config = self.subject.config
        theirs = config.finalize_model_grads_func

        def clipped(*args: Any, **kwargs: Any) -> Any:
            theirs(*args, **kwargs)
            for chunk in self.subject.chunks:
                chunk.scale_gradients(0.125)

        config.finalize_model_grads_func = clipped
        try:
            found = super().finish()
        finally:
            config.finalize_model_grads_func = theirs
        return dataclasses.replace(found, grad_norm=8 * found.grad_norm)


class WeightRaises(SplitStep):
    """Has a loss that weighs layers' losses, of which the model has none."""

    def build(self, subject: Any) -> None:
        super().build(subject)

        def weight(microbatch: Any) -> float:
            raise KeyError("weight")

        self.loss.auxiliary_weight = weight
