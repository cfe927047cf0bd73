"""`SplitStep` with one bug each, as they were in frameworks, for the check that catches it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megatron_idempotent.proof.certify.adapters import Megatron, OrderStable, SplitStep, _Loss
from megatron_idempotent.proof.certify.oracle import counted
from megatron_idempotent.proof.certify.packs import described


class TwiceTheLoss(SplitStep):
    """Forgets a division."""

    def build(self, subject: Any) -> None:
        def loss(output: Tensor, rows: Any) -> Any:
            total, count = subject.loss(output, rows)
            return 2 * total, count

        super().build(dataclasses.replace(subject, loss=loss))


class _MeansOfRows(_Loss):
    kind = "sequence"

    def __call__(self, output: Any, microbatch: Any) -> Any:
        if self.fail:
            return super().__call__(output, microbatch)
        mask_BT = counted(microbatch)
        sums_B = (output * mask_BT * microbatch["scale"][:, None]).sum(1)
        total = (sums_B / mask_BT.sum(1).clamp(min=1)).sum()
        return total, {"nll": total}


class MeanOfMeans(SplitStep):
    """Divides each row by its own length."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.loss = _MeansOfRows(subject)


class EvenSequences(SplitStep):
    """Takes the sequences of a pack for equally long ones."""

    def forward(self, chunk: Any, microbatch: Any) -> Tensor:
        if "pack" not in microbatch:
            return super().forward(chunk, microbatch)
        pack = described(microbatch)
        borders = pack["packed_seq_params"].cu_seqlens_q
        even = torch.linspace(0, int(borders[-1]), len(borders)).to(borders)
        pack["packed_seq_params"].cu_seqlens_q = pack["packed_seq_params"].cu_seqlens_kv = even
        return self.subject.forward(chunk, pack)


class KeepsTheLastCall(SplitStep):
    """Zeroes the gradients in each call."""

    def begin(self) -> None:
        super().begin()
        self.calls = 0

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        if self.calls:
            self.step.abort()
            super().begin()
        self.calls += 1
        super().microbatch(rows, fail=fail)


class _Divided(_Loss):
    kind = "none"


class Counting(SplitStep):
    """Knows how many positions of a step count on this rank; no bug yet."""

    def begin(self) -> None:
        super().begin()
        self.counted = 0.0

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        super().microbatch(rows, fail=fail)
        self.counted += float(counted(rows).sum())


class FirstStepsDivisor(Counting):
    """Goes on dividing by the number of positions of the first step."""

    known = None

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.loss = _Divided(subject)

    def finish(self) -> Any:
        if self.known is None:
            self.known = self.counted * torch.distributed.get_world_size()
        result = self.step.finish(self.open, global_batch_size=1, divisor=self.known)
        return dataclasses.replace(_finished(result), loss=None)


def _finished(result: Any) -> Any:
    from megatron_idempotent.proof.certify import Finished

    return Finished(updated=result.updated, grad_norm=result.grad_norm)


class _MeansOfCalls(_Divided):
    count = 1.0

    def __call__(self, output: Any, microbatch: Any) -> Any:
        total, told = super().__call__(output, microbatch)
        return total / (self.count * torch.distributed.get_world_size()), told


class MeanOfReplicas(SplitStep):
    """Averages replicas, whatever they have."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.loss = _MeansOfCalls(subject)

    def begin(self) -> None:
        super().begin()
        self.calls = 0

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        self.loss.count = max(float(counted(rows).sum()), 1.0)
        self.calls += 1
        super().microbatch(rows, fail=fail)

    def finish(self) -> Any:
        result = self.step.finish(self.open, global_batch_size=1, divisor=float(self.calls))
        return _finished(result)


class _WeighsByTheFirstCall(_Loss):
    share = 1.0

    def auxiliary_weight(self, microbatch: Any) -> float:
        return self.share * microbatch["input_ids"].numel()


class CallsCountAlike(SplitStep):
    """Scales auxiliary losses by the microbatches of a step's first call, in all of its calls."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.loss = _WeighsByTheFirstCall(subject)

    def begin(self) -> None:
        super().begin()
        self.first = 0

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        number = len(rows["input_ids"])
        self.first = self.first or number
        self.loss.share = self.first / max(number, 1)
        super().microbatch(rows, fail=fail)


class RefusesNoRows(SplitStep):
    """Takes the shape of the first row."""

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        rows["input_ids"][0]
        super().microbatch(rows, fail=fail)


class LogprobsZeroGradients(SplitStep):
    """Begins an evaluation as a step begins."""

    def logprobs(self, rows: Any) -> Any:
        for chunk in self.subject.chunks:
            chunk.zero_grad_buffer()
        return super().logprobs(rows)


class ExportRounds(SplitStep):
    """Converts the weights in place."""

    def export(self) -> None:
        super().export()
        with torch.no_grad():
            for chunk in self.subject.chunks:
                for each in chunk.module.parameters():
                    each.copy_(each.to(torch.bfloat16))


class AbortUpdates(SplitStep):
    """Finishes a step that is to be dropped."""

    def abort(self) -> None:
        try:
            super().finish()
        except Exception:  # noqa: BLE001  of a step that has failed
            super().abort()


class SwallowsErrors(SplitStep):
    """Logs an error, and goes on with what is there."""

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        if not fail:
            super().microbatch(rows)


class UpdatesWithNaN(SplitStep):
    """Does not look at the norm."""

    def build(self, subject: Any) -> None:
        from megatron_idempotent import TrainStep

        super().build(subject)
        self.step = TrainStep(
            subject.chunks,
            subject.optimizer,
            forward=subject.forward,
            deadline_s=20.0,
            non_finite="update",
            tenant=self.name,
        )


class WarmsUpTwice(SplitStep):
    """Changes the optimizer in each set-up."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        if getattr(subject.optimizer, "seen", False):
            for group in subject.optimizer.param_groups:
                group["lr"] *= 2
        subject.optimizer.seen = True


class ForgetsMoments(SplitStep):
    """Saves the weights alone."""

    def save(self) -> dict[str, Any]:
        state = super().save()
        return {**state, "optimizer": [[] for _ in state["optimizer"]]}


class DeclaresNaN(UpdatesWithNaN):
    """Says what it does not do."""

    cannot = {"nan": "nobody looks at the norm"}  # noqa: RUF012


class DeclaresNaNOfExperts(UpdatesWithNaN):
    """Says what it does not do in layouts with experts."""

    cannot = {"nan/moe": "nobody looks at the norm"}  # noqa: RUF012


class DeclaresAnUnknownWord(SplitStep):
    """Names no word of a layout."""

    cannot = {"nan/experts": "nobody looks at the norm"}  # noqa: RUF012


class OneRankReportsAnotherNorm(SplitStep):
    """Forgets to take the root, on the last rank."""

    def finish(self) -> Any:
        found = super().finish()
        if torch.distributed.get_rank() == 0:
            return found
        return dataclasses.replace(found, grad_norm=4 * found.grad_norm**2)


class ReportsAnotherLoss(SplitStep):
    """Reports a sum for a mean."""

    def finish(self) -> Any:
        found = super().finish()
        return dataclasses.replace(found, loss=2 * found.loss)


class PromisesBits(SplitStep):
    """Adds gradients up in the order in which they come."""

    def build(self, subject: Any) -> None:
        self.order_stable = False
        super().build(subject)

    order_stable = True


class ScalesWithReplicas(OrderStable):
    """Has a loss that grows a little with the number of replicas."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        loss, ranks = self.loss, torch.distributed.get_world_size()

        class Scaled(_Loss):
            def __call__(self, output: Any, microbatch: Any) -> Any:
                total, metrics = loss(output, microbatch)
                return total * (1 + ranks * 2.0**-24), metrics

        self.loss = Scaled(subject)


class NoPacks(SplitStep):
    """Takes rows alone."""

    packs = False


class LosesMomentsOnTheHost(SplitStep):
    """Brings the optimizer's state back as zeros."""

    def onload(self, *, training: bool = True) -> None:
        super().onload(training=training)
        if training:
            for state in self.subject.optimizer.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.zero_()


class BringsNothingBackForLogprobs(SplitStep):
    """Leaves parameters on the host unless it is to train."""

    def onload(self, *, training: bool = True) -> None:
        if training:
            super().onload()


class DropsGradientsOffloaded(SplitStep):
    """Zeroes what an open step has added up."""

    def offload(self) -> None:
        for chunk in self.subject.chunks:
            chunk.zero_grad_buffer()
        super().offload()


class FinishZeroesAll(SplitStep):
    """Zeroes the gradients of all that it has built when one of them has updated."""

    built: list[Any] = []  # noqa: RUF012

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.built.append(subject)

    def finish(self) -> Any:
        found = super().finish()
        for subject in self.built:
            for chunk in subject.chunks:
                chunk.zero_grad_buffer()
        return found


class OneRankRaises(SplitStep):
    """Raises on the first rank before it agrees with the others, which wait for it."""

    def begin(self) -> None:
        if torch.distributed.get_rank() == 0:
            raise RuntimeError("the first rank cannot begin")
        super().begin()
        torch.distributed.barrier()

    def abort(self) -> None:
        return


class SixAtMost(SplitStep):
    """Cuts a call after the sixth microbatch."""

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        super().microbatch({name: each[:12] for name, each in rows.items()}, fail=fail)


class StepOverZero(SplitStep):
    """Divides a step by what counts in it, which may be nothing."""

    def begin(self) -> None:
        super().begin()
        self.valid = torch.zeros(())

    def microbatch(self, rows: Any, *, fail: bool = False) -> None:
        self.valid = self.valid + counted(rows).sum()
        super().microbatch(rows, fail=fail)

    def finish(self) -> Any:
        torch.distributed.all_reduce(self.valid)
        if self.valid:
            return super().finish()
        self.abort()
        raise RuntimeError("the gradient is NaN")


class NeverGathers(Megatron):
    """Turns off the hooks that gather parameters after an update, and gathers nothing itself."""

    def build(self, subject: Any) -> None:
        super().build(subject)
        for chunk in subject.chunks:
            if chunk.remove_forward_pre_hook_handles:
                chunk.disable_forward_pre_hook(param_sync=False)
